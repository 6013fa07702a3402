"""A trace of the open format becomes a run: what it recorded is there, the rest was not recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from traces import KV_HEADS, LAYERS, PAGE, PROMPT, STEPS, write_full, write_minimal

import kvlens
from kvlens.lens.verdict import verdict
from kvlens.store.export import EXPORTS, TIMELINE, export
from kvlens.store.reader import TraceReader
from kvlens.trace.columns import VERSION
from kvlens.trace.faults import BadTrace
from kvlens.trace.importing import import_checked
from kvlens.trace.limited import import_trace
from kvlens.trace.records import Records

ROOT = Path(__file__).resolve().parents[2]
KILLED = """
import os, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import traces
def step(self, *args, _step=traces.Writer.step, **columns):
    _step(self, *args, **columns)
    if self.steps == 7:
        os._exit(9)
traces.Writer.step = step
traces.write_full(traces.Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def full(runs: Path) -> TraceReader:
    return TraceReader.open(runs, import_checked(write_full(runs.parent / "full-trace"), runs))


@pytest.fixture(scope="module")
def minimal(runs: Path) -> TraceReader:
    return TraceReader.open(runs, import_checked(write_minimal(runs.parent / "minimal-trace"), runs))


def test_the_run_names_its_engine(full: TraceReader) -> None:
    meta = full.meta
    assert meta.method.split(" in ") == ["top-k pages", "toy 0.1"]
    assert meta.imported is not None
    assert (meta.imported.engine, meta.imported.version) == ("toy 0.1", VERSION)
    assert (full.status, full.n_steps, meta.prompt_tokens, meta.answer) == ("completed", STEPS, PROMPT, "o7")
    assert full.self_checks()["passed"].all()


def test_its_records_are_there(full: TraceReader) -> None:
    assert full.spans()["span"].tolist() == [0, 1, 2, 3, 4, 9]
    assert full.steps()["wait_us"].tolist() == [3] * STEPS
    assert full.steps()["h2d_bytes"].tolist() == [512] * STEPS
    assert full.transfers(step=-1)["direction"].tolist() == ["d2h"]
    assert full.span_heads(0, 1)["rank_v"].tolist() == [3] * (PROMPT // PAGE)
    assert full.journal("threshold")["step"].tolist() == list(range(STEPS))
    assert full.decision_counts()[["asked", "granted", "refused", "missed"]].iloc[0].tolist() == [30, 10, 10, 10]
    assert np.isfinite(full.head_cube("coverage")).all()
    keys = full.span_keys(1, 1)
    assert keys is not None
    assert (keys[0].tolist(), keys[1].shape, keys[2]) == ([0, 1, 9], (3, 8), "post-rope")
    assert full.meta.sampled is not None
    loss = verdict(full)
    assert loss is not None
    assert loss.missed is not None
    assert (loss.missed.span, loss.missed.reason.kind) == (loss.step % 3, loss.missed.reason.kind)
    assert loss.missed.state == "cold"


def test_what_the_least_trace_lacks_was_not_recorded(minimal: TraceReader) -> None:
    steps = minimal.steps()
    assert steps[["wait_us", "cold_bytes", "h2d_bytes", "d2h_bytes"]].isna().all(axis=None)
    assert (steps["resident_bytes"] == 1000).all()
    assert minimal.metrics() == ["mass_window"]
    assert minimal.kv_metrics() == []
    assert minimal.loss().empty
    assert verdict(minimal) is None
    assert all(minimal.meta.lacks(table) for table in ("transfer", "event", "kv_step", "oracle"))
    assert not minimal.meta.lacks("head_step")
    assert minimal.meta.sampled is None


@pytest.mark.parametrize("table", [*EXPORTS, TIMELINE])
def test_it_can_be_exported(minimal: TraceReader, full: TraceReader, table: str, tmp_path: Path) -> None:
    for number, reader in enumerate((minimal, full)):
        export(reader, table, "json", tmp_path / f"{number}.json")
        json.loads((tmp_path / f"{number}.json").read_text())


def test_a_killed_writer_leaves_its_committed_steps(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED.format(root=str(ROOT)), str(tmp_path / "t")], check=False)
    assert ended.returncode == 9
    head = json.loads((tmp_path / "t" / "trace.json").read_text())
    assert (head["steps"], head["complete"]) == (4, False)
    with TraceReader.open(tmp_path / "runs", import_checked(tmp_path / "t", tmp_path / "runs")) as reader:
        assert (reader.status, reader.n_steps) == ("cancelled", 4)
        assert len(reader.tokens()) == PROMPT + 4
        assert reader.self_checks()["passed"].all()


def test_rows_of_a_step_that_did_not_end_are_left_out(tmp_path: Path) -> None:
    from kvlens.trace import Writer

    writer = Writer(tmp_path / "t", layers=LAYERS, q_heads=KV_HEADS, kv_heads=KV_HEADS, engine="toy 0.1", block=1)
    writer.prompt([1, 2], ["a", "b"])
    writer.span(0, 0, 2, kind="window")
    for _ in range(2):
        writer.grid("head_step", mass_window=np.ones((LAYERS, KV_HEADS)))
        if not writer.steps:
            writer.step(3, "c", t_us=0, dur_us=1, resident_bytes=1, peak_bytes=1)
    writer.close()
    with TraceReader.open(tmp_path / "runs", import_checked(tmp_path / "t", tmp_path / "runs")) as reader:
        assert (reader.status, reader.n_steps) == ("completed", 1)


def test_the_api_stores_a_trace_and_names_a_fault(tmp_path: Path) -> None:
    run = kvlens.import_trace(write_full(tmp_path / "t"), runs=tmp_path / "runs")
    assert run.verdict.outcome == "diverged"
    for repeat in (lambda: run.hold(1), lambda: run.at(budget="50%"), run.ledger):
        with pytest.raises(kvlens.RunError) as refused:
            repeat()
        assert refused.value.code == "cannot_repeat"
    (tmp_path / "t" / "loss-000001.parquet").unlink()
    with pytest.raises(kvlens.RunError) as raised:
        kvlens.import_trace(tmp_path / "t", runs=tmp_path / "runs")
    assert raised.value.code == "file_missing"
    assert raised.value.values["table"] == "loss"
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_the_commands_store_a_trace_and_end_with_a_fault(tmp_path: Path) -> None:
    folder = write_minimal(tmp_path / "t")
    environment = os.environ | {"KVLENS_RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(ROOT)}

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "kvlens", *words]
        return subprocess.run(line, capture_output=True, text=True, env=environment, check=False)

    uid = command("import", str(folder)).stdout.splitlines()[-1]
    assert (tmp_path / "runs" / uid / "trace.duckdb").is_file()
    head = json.loads((folder / "trace.json").read_text())
    (folder / "trace.json").write_text(json.dumps(head | {"version": 9}))
    checked = command("check-trace", str(folder), "--json")
    assert checked.returncode == 1
    assert json.loads(checked.stdout)["faults"][0]["code"] == "trace_too_new"
    refused = command("import", str(folder))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("kvlens: trace_too_new")


def test_a_span_that_was_born_in_a_step_that_did_not_end_is_left_out(tmp_path: Path) -> None:
    from kvlens.trace import Writer

    writer = Writer(tmp_path / "t", layers=LAYERS, q_heads=KV_HEADS, kv_heads=KV_HEADS, engine="toy 0.1")
    writer.prompt([1, 2], ["a", "b"])
    writer.span(0, 0, 2, kind="window")
    writer.grid("head_step", mass_window=np.ones((LAYERS, KV_HEADS)))
    writer.step(3, "c", t_us=0, dur_us=1, resident_bytes=1, peak_bytes=1)
    writer.span(1, 2, 3)
    writer.close()
    with TraceReader.open(tmp_path / "runs", import_checked(tmp_path / "t", tmp_path / "runs")) as reader:
        assert reader.spans()["span"].tolist() == [0]


@pytest.mark.parametrize("failure", [MemoryError, KeyboardInterrupt, ValueError])
def test_an_import_that_fails_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    def fail(self: Records, step: int) -> None:
        if step == 2:
            raise failure

    monkeypatch.setattr(Records, "_oracle", fail)
    with pytest.raises(failure):
        import_checked(write_full(tmp_path / "t"), tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_import_whose_process_is_killed_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies while the run is written, as one does whose memory has ended."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'import' in sys.orig_argv:\n"
        "    import os\n"
        "    from kvlens.trace.records import Records\n"
        "    Records._oracle = lambda self, step: os._exit(9) if step == 2 else None\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(BadTrace) as raised:
        import_trace(write_full(tmp_path / "t"), tmp_path / "runs")
    assert raised.value.faults[0].value == "exit status 9"
    assert list((tmp_path / "runs").iterdir()) == []
