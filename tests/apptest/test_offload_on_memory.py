"""A run that the GPU bench's part `offload` has stored, opened on the Memory page: its timeline is of the
copies that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

from uiruns import Visit

from kvlens.lab.gpu import offload
from kvlens.lab.gpu.device import DryDevice
from kvlens.lab.gpu.part import Bench
from kvlens.lab.gpu.tier import Way
from kvlens.store.reader import TraceReader


def test_the_timeline_is_of_the_copies_that_the_run_measured(visit: Visit, tmp_path: Path) -> None:
    bench = Bench(DryDevice(), (256,), (1,), {"entries": {}}, runs=tmp_path)
    bench.kept["moving"] = [Way("freekv", {}, 0.0, 1)]
    (row,) = offload.measure(bench)
    assert row.trace is not None
    with TraceReader.open(tmp_path, row.trace) as reader:
        copies = reader.transfers_between(0, reader.n_steps)
    app = visit(tmp_path, "memory", run=row.trace)
    assert not app.exception
    figures = [json.loads(element.proto.spec) for element in app.get("plotly_chart")]
    timeline = next(figure for figure in figures if "copies beside the steps" in figure["layout"]["title"]["text"])
    bars = [trace for trace in timeline["data"] if trace["name"] != "engine step"]
    hows = {"blocking" if blocking else "background" for blocking in copies["blocking"]}
    assert {trace["name"].rpartition(", ")[2] for trace in bars} == hows
    said = " ".join(caption.value for caption in app.caption).replace("\\", "")
    made = len(set(zip(copies["direction"], copies["start_us"], copies["end_us"], strict=True)))
    assert 0 < made < len(copies), "a copy brings the rows of several KV heads"
    assert sum(len(trace["hovertext"]) for trace in bars) == made, "and is one bar"
    assert re.search(rf"\b{made:,} copies .*; link: host-copy\.", said)
    assert row.overlapped is not None
    assert f"({row.overlapped:.0%})" in said
