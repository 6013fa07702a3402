"""The Benchmarks page on hand-made results of a GPU. Its figures are made up and belong to no device."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from uiruns import Runs, Visit

from kvlens.app.ui.common import sentences
from kvlens.lab.gpu.settings import everything
from kvlens.lab.results.gpu import (
    CeilingRow,
    CheckRow,
    Entry,
    HeadlineRow,
    KernelRow,
    LedgerRow,
    RateSource,
    RecordingRow,
    Row,
    StepRow,
)
from kvlens.lab.results.offloadrow import OffloadRow

DEVICE = {"name": "Made Up 9000", "driver": "1.2", "clocks": "SM 1 MHz", "memory_bytes": 1}


def step(
    method: str, context: int, median: float | None, reason: str | None = None, source: RateSource = "papers"
) -> StepRow:
    rates = dict(everything()[method].rates)
    of = source if rates else "none"
    return StepRow(method, context, 1, True, 200, median, median, 0.005, 1.2, 0.0, 15, 0, 4, 19, "", reason, rates, of)


def entry(part: str, *rows: Row, reason: str | None = None) -> Entry:
    return Entry(
        part, "failed" if reason else "done", "s", "c", "2026-01-02", 1.0, rows, reason, "less" if reason else None
    )


def result(*entries: Entry, dry_run: bool = False) -> dict[str, Any]:
    return {
        "format": 2,
        "dry_run": dry_run,
        "device": DEVICE,
        "versions": {"torch": "2"},
        "note": "random weights.",
        "updated": "2026-01-02",
        "missing": ["decode sweep 1"],
        "entries": {each.part: asdict(each) for each in entries},
    }


WHOLE = (
    entry(
        "ceilings",
        CeilingRow("device copy", "2 GiB", 1.0, 3e12, "B/s", 3e12),
        CeilingRow("bf16 matmul", "n", 1.0, 7e14, "FLOP/s", 7e14),
        CeilingRow("zero-copy gather", "16 units, 8 CTAs", 1.0, 5e10, "B/s", 5e10),
    ),
    entry(
        "checks",
        CheckRow("k1: output", 1e-3, 1e-2, True),
        CheckRow("k2 MaxQ", 0.5, 1e-2, False),
        CheckRow("bytes, behind a tie of choices", 0.5, 0.0, None),
    ),
    entry(
        "kernels",
        KernelRow("k1", "32768 tokens", 1e-4, 1e8, 1e12, "device copy", 0.33, 0.8),
        KernelRow("flex_attention", "8192 tokens", None, 1.0, None, "device copy", None, None, "it failed"),
    ),
    entry("decode 8192 x 1", step("full", 8192, 0.006), step("chess", 8192, None, "does not fit: needs 9 GB")),
    entry("decode 32768 x 1", step("freekv", 32768, 0.0055, source="recorded")),
    entry("decode sweep 32768", step("blocking", 32768, 0.009)),
    entry("ledger", LedgerRow("copies", 1, 1, 1, "profiler", True)),
    entry(
        "headlines",
        HeadlineRow("CHESS against FullKV at 32K", "step time", 4.56, 1.125, 1.28, "x", False),
        HeadlineRow("FreeKV against ArkVale", "step time", 13.7, None, 1.78, "y", False, "papers"),
        HeadlineRow("FreeKV against ArkVale", "step time", 13.7, 1.5, 1.6, "y", False, "recorded"),
    ),
    entry("recording", reason="The device ran out of memory: x"),
)
OFFLOAD = entry(
    "offload",
    OffloadRow("freekv", "smollm2", "float16", 8168, "20%", 24, 20.0, 18.0, True, 240_000_000, 0, 0.1, 0.4, 0.75),
    OffloadRow("sekv", "smollm2", "float16", 8168, "20%", 24, 20.0, 18.0, False, 1, 0, 0.1, 0.4, failed=("peak",)),
    OffloadRow("infllm", "smollm2", "float16", 8168, "20%", 24, reason="needs 40.0% of full KV on the device"),
)


MORE = (
    entry("decode 8192 x 1", replace(step("full", 8192, 0.007), loop=0.009), step("hf_offloaded", 8192, 0.7)),
    entry("decode 8192 x 8, replayed", replace(step("freekv", 8192, 0.02), batch=8, note="issued one by one")),
    entry("decode sweep 8192", step("blocking", 8192, 0.011)),
    entry("compiled 8192 full", replace(step("full", 8192, 0.006), scope="compiled")),
    entry(
        "recording",
        RecordingRow("off", True, 32768, 1, 0.006, 0.006, 0.0, "freekv"),
        RecordingRow("spans", True, 32768, 1, 0.0063, 0.0064, 0.05, "freekv"),
    ),
)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLENS_RESULTS", str(tmp_path))
    return tmp_path


def test_shows_device_date_figures_and_what_failed(visit: Visit, runs: Runs, results: Path) -> None:
    (results / "gpu-made-up-9000.json").write_text(json.dumps(result(*WHOLE)))
    app = visit(runs.folder, "benchmarks")
    said = " ".join(box.value for box in app.caption).replace("\\", "")
    assert "Made Up 9000, driver 1.2, torch 2, measured 2026-01-02; clocks as found: SM 1 MHz" in said
    assert "random weights" in said
    assert [metric.value for metric in app.metric] == ["3.00 TB/s", "700 TFLOP/s"]
    told = "1 of 3 checks failed on this device: k2 MaxQ. Not compared, behind a tie: 1."
    assert app.error[0].value.replace("\\", "") == told
    assert not app.warning
    (listed,) = (box for box in app.expander if box.label.startswith("2 parts"))
    unmeasured = [line.value.replace("\\", "") for line in listed.markdown]
    assert unmeasured[0] == "decode sweep 1: not begun."
    assert re.search(r"recording: .*: x\. Try: less\.", unmeasured[1])
    table = next(frame.value for frame in app.dataframe if "achieved / floor" in frame.value)
    assert list(table["method"]) == ["FullKV", "CHESS (uncalibrated trigger)"]
    assert table["notes"][1] == "does not fit: needs 9 GB"
    headlines = next(frame.value for frame in app.dataframe if "headline" in frame.value)
    assert list(headlines["replayed rates"]) == ["", "the papers'", "recorded"]
    assert list(headlines["here"]) == ["1.12", "not measured", "1.50"]


def test_another_cell_can_be_chosen(visit: Visit, runs: Runs, results: Path) -> None:
    (results / "gpu-made-up-9000.json").write_text(json.dumps(result(*WHOLE)))
    app = visit(runs.folder, "benchmarks")
    app.button_group(key="gpu_cell_decode").set_value("32K x 1").run()
    assert not app.exception
    table = next(frame.value for frame in app.dataframe if "achieved / floor" in frame.value)
    assert list(table["method"]) == ["FreeKV"]
    assert list(table["replayed rates"]) == ["miss 0.3, correction 0.14 (recorded)"]


def test_whole_steps_come_first_and_compiled_ones_are_a_click_away(visit: Visit, runs: Runs, results: Path) -> None:
    (results / "gpu-made-up-9000.json").write_text(json.dumps(result(WHOLE[0], *MORE)))
    app = visit(runs.folder, "benchmarks")
    tables = [frame.value for frame in app.dataframe if "achieved / floor" in frame.value]
    assert [list(table["method"]) for table in tables] == [
        ["FullKV", "transformers, offloaded cache"],
        ["Blocking recall"],
    ]
    assert tables[0][sentences.LOOP_TIME][0] == 9.0
    assert list(tables[1]["replayed rates"]) == ["miss 0.3 (the papers')"]
    said = " ".join(box.value for box in app.caption).replace("\\", "")
    assert "Whole decode steps." in said
    assert "whole step of FreeKV at 32K" in said
    app.button_group(key="gpu_cell_decode").set_value("8K x 8").run()
    eight = next(frame.value for frame in app.dataframe if "achieved / floor" in frame.value)
    assert eight[["method", "sequences", "notes"]].to_numpy().tolist()[0][:2] == ["FreeKV", 8]
    assert all(eight["notes"])
    app.button_group(key="gpu_scope").set_value("compiled").run()
    assert not app.exception
    tables = [frame.value for frame in app.dataframe if "achieved / floor" in frame.value]
    assert [list(table["method"]) for table in tables] == [["FullKV"]]


def test_offload_is_a_table_and_what_failed_is_said(visit: Visit, runs: Runs, results: Path) -> None:
    (results / "gpu-made-up-9000.json").write_text(json.dumps(result(OFFLOAD)))
    app = visit(runs.folder, "benchmarks")
    assert not app.exception
    table = next(frame.value for frame in app.dataframe if "tokens/s" in frame.value)
    assert table["to the device (MB)"][0] == 240.0
    assert table[sentences.BESIDE_MODEL][0] == 0.75
    assert [re.findall(r"[\d.]+%|peak", note) for note in table["notes"]] == [[], ["peak"], ["40.0%"]]
    assert "run of" not in table, "all are of one model, prompt and budget"
    said = " ".join(box.value for box in app.caption).replace("\\", "")
    assert "smollm2 in float16, a prompt of 8,168 tokens, 20% of full KV on the device, 24 steps, through" in said
    # what was refused is no check
    assert re.fullmatch(r"1 of 2 .*: offload, sekv\.", app.error[0].value.replace("\\", ""))


def test_runs_that_pass_are_counted_and_what_each_is_of_is_said(visit: Visit, runs: Runs, results: Path) -> None:
    passed = OFFLOAD.rows[0]
    assert isinstance(passed, OffloadRow)
    other = replace(passed, method="sekv", model="demo", context=500)
    page = result(entry("offload", passed, other), entry("ledger", LedgerRow("copies", 1, 1, 1, "profiler", True)))
    (results / "gpu-made-up-9000.json").write_text(json.dumps(page))
    app = visit(runs.folder, "benchmarks")
    table = next(frame.value for frame in app.dataframe if "tokens/s" in frame.value)
    rest = "20% of full KV on the device, 24 steps"
    assert list(table["run of"]) == [
        f"smollm2 in float16, a prompt of 8,168 tokens, {rest}",
        f"demo in float16, a prompt of 500 tokens, {rest}",
    ]
    said = [box.value.replace("\\", "") for box in app.caption]
    assert any(line.startswith("All 3 checks of kernels,") for line in said)
    assert any(line.startswith("Real offload: ") for line in said)
    assert not app.error


def test_a_dry_run_is_not_shown(visit: Visit, runs: Runs, results: Path) -> None:
    (results / "gpu-dry-run.json").write_text(json.dumps(result(*WHOLE, dry_run=True)))
    app = visit(runs.folder, "benchmarks")
    assert not app.metric
    assert "docs/evidence/performance.md" in app.info[-1].value


def test_an_interrupted_sitting_is_shown_as_far_as_it_went(visit: Visit, runs: Runs, results: Path) -> None:
    (results / "gpu-made-up-9000.json").write_text(json.dumps(result(WHOLE[0])))
    app = visit(runs.folder, "benchmarks")
    assert len(app.metric) == 2
    assert not app.error


@pytest.mark.parametrize("text", ["not json", "[1]", "{}", json.dumps({**result(), "entries": {"steps": {"part": 1}}})])
def test_a_damaged_file_is_one_sentence(visit: Visit, runs: Runs, results: Path, text: str) -> None:
    (results / "gpu-x.json").write_text(text)
    app = visit(runs.folder, "benchmarks")
    assert len(app.error) == 1
    assert "measure it again" in app.error[0].value


def test_the_memory_page_shows_a_measured_bus_with_its_device(visit: Visit, runs: Runs, results: Path) -> None:
    def said() -> str:
        page = visit(runs.folder, "memory", run=runs.whole)
        assert not page.exception
        return " ".join(caption.value for caption in page.caption)

    assert sentences.NO_BUS in said()
    (results / "gpu-made-up-9000.json").write_text(json.dumps(result(*WHOLE)))
    assert "Made Up 9000" in (shown := said())
    assert sentences.NO_BUS not in shown
    (results / "gpu-made-up-9000.json").write_text(json.dumps(result(*WHOLE, dry_run=True)))
    assert sentences.NO_BUS in said()
