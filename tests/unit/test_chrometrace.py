"""The timeline export is a valid trace: every slice has a time, every lane a name, and slices of a lane lie inside each
other or apart."""

from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlens.cli.main import app
from kvlens.records import StepRecord
from kvlens.rows import TransferRow
from kvlens.store.export import TIMELINE, export
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter
from tests.synthetic import write_synthetic


class Crowded(TraceWriter):
    """Logs copies that overlap."""

    def step(self, record: StepRecord) -> None:
        at = record.t_us
        overlapping = [
            TransferRow(record.step, 0, 0, None, "h2d", "prefetch", 1, at + 10 * i, at + 25 + 10 * i, 0, False)
            for i in range(4)
        ]
        super().step(replace(record, transfers=[*record.transfers, *overlapping]))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceReader]:
    folder = tmp_path_factory.mktemp("runs")
    with TraceReader.open(folder, write_synthetic(folder, 2, 4, 2, 20, 12, writer_class=Crowded)) as opened:
        yield opened


@pytest.fixture(scope="module")
def events(reader: TraceReader) -> list[dict[str, Any]]:
    out = io.BytesIO()
    export(reader, TIMELINE, "json", out)
    return list(json.loads(out.getvalue())["traceEvents"])


def slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def test_every_slice_has_a_time_and_a_named_lane(events: list[dict[str, Any]]) -> None:
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"engine steps", "h2d: host to device", "d2h: device to host"} <= set(names.values())
    for event in slices(events):
        assert isinstance(event["ts"], int)
        assert isinstance(event["dur"], int)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["tid"] in names
        assert {"name", "cat", "pid"} <= set(event)


def test_steps_and_copies_are_all_there_once(reader: TraceReader, events: list[dict[str, Any]]) -> None:
    found = slices(events)
    assert sum(event["cat"] == "step" for event in found) == reader.n_steps
    assert sum(event["cat"] == "prefill" for event in found) == 1
    copies = [event for event in found if event["cat"].startswith(("h2d", "d2h"))]
    table = reader.transfers()
    assert len(copies) == len(table)
    assert sum(event["args"]["bytes"] for event in copies) == table["bytes"].sum()
    assert sum(event["dur"] for event in copies) == (table["end_us"] - table["start_us"]).sum()
    assert all("kv_head" not in event["args"] or event["args"]["kv_head"] in (0, 1) for event in copies)


def test_slices_of_a_lane_lie_apart(events: list[dict[str, Any]]) -> None:
    by_lane = defaultdict(list)
    for event in slices(events):
        by_lane[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_lane) > 3
    for lane in by_lane.values():
        lane.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(lane))


def test_counters_hold_the_bytes_of_both_tiers(reader: TraceReader, events: list[dict[str, Any]]) -> None:
    counters = [event for event in events if event["ph"] == "C"]
    steps = reader.steps()
    assert [event["args"]["on the device"] for event in counters] == steps["resident_bytes"].tolist()
    assert [event["args"]["in host memory"] for event in counters] == steps["cold_bytes"].tolist()


def test_the_command_line_writes_it_as_json_alone(reader: TraceReader, tmp_path: Path) -> None:
    folder, target = str(reader._folder.parent), tmp_path / "trace.json"
    arguments = ["export", reader.uid, "--what", "chrome-trace", "--runs", folder, "--out", str(target)]
    for options in ((), ("--format", "json")):
        assert CliRunner().invoke(app, [*arguments, *options]).exit_code == 0
        assert json.loads(target.read_text())["otherData"]["run"] == reader.uid
        target.unlink()
    assert CliRunner().invoke(app, [*arguments, "--format", "csv"]).exit_code != 0
    assert not target.exists()
