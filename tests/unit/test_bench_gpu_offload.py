"""Offload and the engine's own copies on the GPU bench, in a dry run: every method that moves KV, its rows against its
trace, what is not here, what an earlier sitting has left."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlens import methods
from kvlens.lab.gpu import ledger, offload, row_gathers, tier
from kvlens.lab.gpu.device import DryDevice
from kvlens.lab.gpu.failures import Lacking
from kvlens.lab.gpu.offload import PART, measure, spread
from kvlens.lab.gpu.part import Bench
from kvlens.lab.gpu.tables import OFFLOAD_HEAD, _offload
from kvlens.lab.gpu.tier import Ground, Way, moving
from kvlens.lab.results.gpu import Entry, LedgerRow
from kvlens.lab.results.offloadrow import OffloadRow
from kvlens.models import catalogue, find
from kvlens.store.reader import TraceReader

pytestmark = pytest.mark.usefixtures("quick_gc")
FEW = ("freekv", "sentkv")


def bench(folder: Path, *held: OffloadRow, **more: Any) -> Bench:
    entry = Entry(PART.name, "failed", PART.sources, "c", "2026-01-02", 1.0, held)
    result = {"entries": {PART.name: asdict(entry)} if held else {}}
    made = Bench(DryDevice(), (256,), (1,), result, runs=folder, **more)
    made.kept["moving"] = [Way(name, {}, 0.0, 1) for name in FEW]
    return made


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[OffloadRow]]:
    folder = tmp_path_factory.mktemp("offloaded")
    return folder, list(measure(bench(folder)))


@pytest.fixture(scope="module")
def moved() -> list[Way]:
    return moving()


def test_what_moves_is_found_by_what_it_asks_of_the_memory(moved: list[Way]) -> None:
    names = {way.name for way in moved}
    assert {"sekv", "freekv", "sentkv", "arkvale", "pqcache"} <= names
    assert not names & {"full", "streaming_llm", "snapkv", "quest", "kivi"}


def test_rows_are_what_their_traces_say(found: tuple[Path, list[OffloadRow]]) -> None:
    folder, rows = found
    assert [row.method for row in rows] == list(FEW)
    for row in rows:
        assert (row.reason, row.failed, row.same, row.passed) == (None, (), True, True)
        assert row.trace is not None
        with TraceReader.open(folder, row.trace) as reader:
            steps, copies = reader.steps(), reader.transfers_between(0, reader.n_steps)
            assert len(steps) == row.steps
            assert int(steps["h2d_bytes"].sum()) == row.h2d_bytes == int(copies["bytes"].sum()) > 0
            assert (copies["end_us"] >= copies["start_us"]).all()
            assert row.waited == pytest.approx(steps["wait_us"].sum() / 1e6)
            assert reader.meta.link == "host-copy"
            assert int(steps["cold_bytes"].iloc[-1]) == row.cold_bytes
            assert reader.meta.trace_level == "spans"
        assert row.overlapped is not None
        assert 0 <= row.overlapped <= 1
        assert len(_offload(row)) == len(OFFLOAD_HEAD)
    assert _offload(OffloadRow("m", "x", "float16", 8, "20%", 3, reason="it broke"))[2] == "it broke"
    wrong = replace(rows[0], failed=("peak",), same=False)
    assert _offload(wrong)[OFFLOAD_HEAD.index("self-checks")] == "**FAILED**: peak, tokens differ when recorded"


def test_traces_are_spread_over_the_families() -> None:
    names = [name for name, method in methods.registry().items() if method.family.endswith("retrieval")]
    first = spread(names, 3)
    assert len({methods.get(name).family for name in first}) == 3
    assert spread(names[:2], offload.TRACES) == spread(names[:2], 2)


def test_of_a_run_whose_trace_is_too_large_less_is_stored(
    found: tuple[Path, list[OffloadRow]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rows = found
    whole = (folder / str(rows[0].trace) / "trace.duckdb").stat().st_size
    for most, level in ((whole - 1, "heads"), (1000, None)):
        monkeypatch.setattr(offload, "MOST_BYTES", most)
        made = bench(tmp_path / str(most))
        made.kept["moving"] = made.kept["moving"][:1]
        (row,) = measure(made)
        traces = list((tmp_path / str(most)).glob("*/trace.duckdb"))
        assert row.passed
        assert "with spans the trace has" in row.note
        assert [trace.parent.name for trace in traces] == ([row.trace] if level else [])
        if level is None:
            assert (row.trace, "Not stored" in row.note) == (None, True)
            continue
        with TraceReader.open(tmp_path / str(most), str(row.trace)) as reader:
            assert reader.meta.trace_level == level
            assert int(reader.transfers_between(0, reader.n_steps)["bytes"].sum()) == row.h2d_bytes


@pytest.mark.usefixtures("fresh_names")
def test_a_folder_on_the_path_stands_for_the_models_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/evidence/performance.md has it: for a machine where the package is not installed."""
    file = tmp_path / find.PACKAGE / find.GGUF_FILE
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find.smollm2_file() == file


@pytest.fixture
def fresh_names() -> Iterator[None]:
    find.smollm2_file.cache_clear()
    yield
    find.smollm2_file.cache_clear()


def test_what_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_model", lambda bench: "nowhere.gguf")
    with pytest.raises(Lacking, match=r"^'nowhere.gguf' is not a model folder: give") as absent:
        list(measure(bench(tmp_path)))
    assert "docs/evidence/performance.md" in absent.value.todo
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "duckdb" else there(name))
    with pytest.raises(Lacking, match=r"^the package 'duckdb' is not installed here"):
        list(measure(bench(tmp_path)))


def test_what_an_earlier_sitting_left_is_not_run_again(
    found: tuple[Path, list[OffloadRow]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rows = found
    refused = replace(rows[1], tokens_per_s=None, reason="The device ran out of memory")
    left: list[OffloadRow] = []
    with pytest.raises(Lacking, match=r"^the time was over before sentkv"):
        left.extend(measure(bench(tmp_path, rows[0], refused, until=0.0)))
    monkeypatch.setattr(offload, "_prepared", lambda *given: pytest.fail("everything is there"))
    assert [asdict(row) for row in measure(bench(tmp_path, *rows))] == [asdict(row) for row in rows]


def test_rows_of_another_model_are_not_held(
    found: tuple[Path, list[OffloadRow]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rows = found
    other = replace(rows[0], model="smollm2", tokens_per_s=1.0)
    assert bench(tmp_path, other, rows[1]).held(PART) == [asdict(rows[1])]
    monkeypatch.setattr(offload, "_prepared", lambda bench, names: None)
    monkeypatch.setattr(offload, "_row", lambda bench, prepared, name, traced: replace(rows[0], note="run again"))
    assert [(row.model, row.method, row.note) for row in measure(bench(tmp_path, other, rows[1]))] == [
        ("demo", rows[1].method, rows[1].note),
        ("demo", rows[0].method, "run again"),
    ]


def test_a_prompt_is_as_long_as_the_models_context_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "entry", lambda name: SimpleNamespace(context=400))
    made = bench(tmp_path)
    made.kept["moving"] = made.kept["moving"][:1]
    (row,) = measure(made)
    assert row.reason is None
    assert 300 < row.context <= 400 - row.steps


def test_a_method_that_is_refused_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "DRY_BUDGET", "3%")
    rows = list(measure(bench(tmp_path)))
    assert all(row.reason is not None and "of full KV on the device" in row.reason for row in rows)


# the engine's own copies


@pytest.fixture(scope="module")
def ground() -> Ground:
    return Ground.build("cpu", "float32", 2)


def engine_rows(ground: Ground, way: Way) -> list[LedgerRow]:
    dry = Bench(DryDevice(), (256,), (1,), {"entries": {}})
    return list(ledger._of_engine(dry, replace(way, steps=2), ground, way.title))


def test_the_ledgers_rows_are_the_bytes_that_a_link_wrote(ground: Ground, moved: list[Way]) -> None:
    for way in moved:
        there, back = engine_rows(ground, way)
        assert (there.name, back.name) == (f"{way.title}, h2d", f"{way.title}, d2h")
        assert there.passed
        assert back.passed
        assert there.counted == there.seen > 0 < there.events
        assert back.counted == back.seen > 0 < back.events


def test_a_row_that_is_missing_is_a_difference(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(tier.Sink):
        def _add(self, record: Any) -> None:
            super()._add(replace(record, transfers=record.transfers[1:]))

    monkeypatch.setattr(ledger, "Sink", Forgetful)
    assert not any(row.passed for row in engine_rows(ground, Way("freekv", {}, 0.0, 2)))


def test_of_a_profile_the_copies_beside_the_models_stream_are_the_links() -> None:
    def event(kind: str, name: str, stream: int, count: int = 0) -> dict[str, Any]:
        return {"cat": kind, "name": name, "args": {"stream": stream, "bytes": count}}

    events = [
        *[event("kernel", "k1", 7)] * 3,
        event("kernel", "spread", 21),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 13, 100),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 13, 20),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7, 8),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 17, 40),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 7, 4),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 21, 1000),
        {"cat": "cpu_op", "name": "aten::copy_", "args": {}},
    ]
    assert ledger.beside_the_model(events) == ({"h2d": (120, 2), "d2h": (40, 1)}, 12)


def test_the_pool_is_filled_before_copies_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills the pool crosses the bus as well: in a call of the ledger alone the profiler saw it."""
    monkeypatch.setattr("kvlens.lab.gpu.part.POOL_BYTES", 64 << 20)
    ours = bench(tmp_path)
    monkeypatch.setattr(ours.device, "dry", False)
    made: list[bool] = []

    def profiled(work: Any, of: Bench) -> list[dict[str, Any]]:
        made.append("pool" in vars(of))
        return []

    monkeypatch.setattr(ledger, "_events", profiled)
    ledger._copies(ours)
    assert made == [True]


@pytest.mark.parametrize("row_bytes", [256, 4096])
def test_rows_are_gathered_from_where_the_list_says(row_bytes: int) -> None:
    ours = Bench(DryDevice(), (512,), (1,), {"entries": {}})
    pool = torch.arange(1 << 14, dtype=torch.int16)
    rows, target = pool.view(-1, row_bytes // 2), torch.empty(3, row_bytes // 2, dtype=torch.int16)
    row_gathers._read(ours, rows, torch.tensor([2, 0, 1]), target, 16)
    assert torch.equal(target, rows[[2, 0, 1]])


def test_rows_of_every_size_have_their_figures(tmp_path: Path) -> None:
    ours = Bench(DryDevice(), (512,), (1,), {"entries": {}})
    found = list(row_gathers.measure(ours))
    assert len(found) == len(row_gathers.ROWS) * len(row_gathers.DRY_TOTALS)
    assert all(row.seconds and row.rate == row.bytes / row.seconds for row in found)
