"""Whole decode steps of several sequences in `kvlens bench gpu`, on the CPU with tiny shapes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlens.lab.gpu import decode, decode_parts, decoding, plain
from kvlens.lab.gpu.device import DryDevice
from kvlens.lab.gpu.floors import LLAMA_8B, Traffic, traffic
from kvlens.lab.gpu.headlines import at_papers, compare, list_measurable
from kvlens.lab.gpu.part import Bench
from kvlens.lab.gpu.rates import RateTable
from kvlens.lab.gpu.report import page
from kvlens.lab.gpu.run import BATCHES, CONTEXTS, all_parts
from kvlens.lab.gpu.settings import BASELINES, OFFLOADED, everything, settings
from kvlens.lab.results.gpu import Entry, Result, StepRow
from kvlens.models.device import host_bytes
from kvlens.tiers.slots import PromptStore

pytestmark = pytest.mark.usefixtures("quick_gc")

KNOWN = everything()
RECALLING = tuple(name for name, setting in settings().items() if setting.rates)
CEILINGS = [{"kind": "ceiling", "name": name, "rate": 1e9} for name in ("device copy", "pinned to device")]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(DryDevice(), (512,), (1, 2), {"entries": {"ceilings": {"rows": CEILINGS}}})


@pytest.fixture(scope="module")
def rows(bench: Bench) -> dict[str, StepRow]:
    return {row.method: row for part in decode_parts.decodes(512, 2) for row in part.run(bench)}  # type: ignore[misc]


def moved(name: str, model: Any, context: int, batch: int) -> Traffic:
    """At the papers' rates."""
    setting = KNOWN[name]
    assert setting.shape is not None
    return traffic(setting.shape(model.kv, context, setting.rates), model, batch)


@pytest.mark.slow
def test_every_method_makes_steps_of_two_sequences(rows: dict[str, StepRow]) -> None:
    assert sorted(rows) == sorted(KNOWN)
    for row in rows.values():
        assert (row.reason, row.batch, row.scope) == (None, 2, "decode")
        assert row.median is not None
        assert (row.loop is None) == (row.method in BASELINES)
        assert (row.stall is not None) == (row.method in RECALLING)
        assert (decode.ONE_BY_ONE in row.note) == (row.method not in BASELINES), "which is a batch of transformers' own"


def test_both_sequences_bytes_are_counted(bench: Bench, rows: dict[str, StepRow]) -> None:
    for name in RECALLING:
        alone = moved(name, bench.model, 512, 1)
        assert rows[name].counted_bytes == rows[name].host_bytes == 2 * alone.host_bytes > 0, name
    one = decode.cell(bench, KNOWN["streaming_llm"], 512, {})
    assert rows["streaming_llm"].resident_bytes == 2 * one.resident_bytes


def test_weights_are_in_a_floor_once() -> None:
    one, eight = (moved("full", LLAMA_8B, 8192, batch) for batch in (1, 8))
    assert eight.device_bytes - eight.weights == 8 * (one.device_bytes - one.weights)
    assert eight.weights == one.weights


def test_one_whole_prompt_at_a_time_lies_on_the_device(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: set[int] = set()
    most = 0
    real = PromptStore.__init__

    class Gone:
        """Goes when the store that holds it goes."""

        def __init__(self, number: int) -> None:
            self.number = number
            alive.add(number)

        def __del__(self) -> None:
            alive.discard(self.number)

    def init(self: Any, *given: Any, **more: Any) -> None:
        nonlocal most
        real(self, *given, **more)
        self.gone = Gone(id(self))
        most = max(most, len(alive))

    monkeypatch.setattr(PromptStore, "__init__", init)
    with torch.inference_mode():
        made = decoding.begin(bench, KNOWN["freekv"], 256, KNOWN["freekv"].rates, batch=3)
    assert len(made.sessions) == 3
    assert (most, alive) == (1, set())
    made.close()


def test_sequences_share_host_memory_and_nothing_on_the_device(bench: Bench) -> None:
    with torch.inference_mode():
        made = decoding.begin(bench, KNOWN["freekv"], 256, KNOWN["freekv"].rates, batch=2)
    first, second = made.sessions
    assert [x.data_ptr() for x in first.memory.host.cold.pools] == [x.data_ptr() for x in second.memory.host.cold.pools]
    assert not {x.data_ptr() for x in (p.keys for p in first.memory.hot.pools)} & {
        x.data_ptr() for x in (p.keys for p in second.memory.hot.pools)
    }
    assert made.replays[0] is not made.replays[1]
    made.close()


def test_timed_launches_leave_all_sequences_where_they_were(bench: Bench) -> None:
    with torch.inference_mode():
        made = decoding.begin(bench, KNOWN["blocking"], 256, KNOWN["blocking"].rates, batch=2)
        before = [int(session.position) for session in made.sessions]
        assert len(made.times(False, 4)) == 4
        assert [int(session.position) for session in made.sessions] == before
        made.rest()
        moved = made.decoder.moved_bytes()
        made.steps(2)
        assert torch.equal(made.decoder.moved_bytes(), moved), "nobody wishes"
        made.close()


def test_what_does_not_fit_is_counted_for_all_sequences(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def needed(batch: int) -> float:
        reason = decode.cell(bench, KNOWN["full"], 256, {}, batch=batch).reason
        assert reason is not None
        found = re.fullmatch(r"does not fit: needs ([\d.]+) GB beside the weights, 0.0 GB free; (.*)", reason)
        assert found is not None
        assert ("--batches 1" in found[2]) == (batch > 1)
        return float(found[1])

    monkeypatch.setattr(DryDevice, "free_bytes", lambda self: 0)
    one, eight = needed(1), needed(8)
    assert eight - one == pytest.approx(7 * decode.SPARE_EACH / 1e9, abs=0.1)
    monkeypatch.setattr(Bench, "model", LLAMA_8B)
    monkeypatch.setattr(Bench, "keep_alone", lambda *given: None)
    reason = decode.cell(bench, KNOWN["full"], 131072, {}, batch=8).reason
    assert reason is not None
    assert reason.startswith("does not fit: needs 162.7 GB beside the weights"), "one prompt and eight caches"


@pytest.mark.parametrize(
    ("free", "link", "said"),
    [
        (40e9, 52e9, "does not fit: needs 42.9 GB of host memory, 40.0 GB free"),
        (400e9, 1e9, "left out: 5 steps would hold the bus for 344 s"),
        (400e9, 52e9, None),
        (None, None, None),
    ],
)
def test_the_offloaded_cache_is_refused_before_the_host_dies(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, free: float | None, link: float | None, said: str | None
) -> None:
    monkeypatch.setattr(plain, "host_bytes", lambda: free)
    monkeypatch.setattr(Bench, "model", LLAMA_8B)
    monkeypatch.setattr(DryDevice, "dry", False)
    found = plain.refused(bench, OFFLOADED, 32768, 8, link)
    assert (found is None) if said is None else (found is not None and found.startswith(said))
    assert plain.refused(bench, "hf_eager", 32768, 8, link) is None


def test_host_memory_is_the_least_of_what_kernel_and_group_leave(tmp_path: Path) -> None:
    assert host_bytes(tmp_path) is None
    for name, text in {
        "proc/meminfo": "MemTotal: 99 kB\nMemAvailable:       50 kB\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "1000\n",
        "sys/fs/cgroup/memory.stat": "anon 600\ninactive_file 400\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_bytes(tmp_path) == 51200
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("31000\n")
    assert host_bytes(tmp_path) == 30400


# order, headlines, tables


def test_whole_steps_of_eight_come_after_those_of_one_and_before_what_is_extra() -> None:
    names = [part.name for part in all_parts(CONTEXTS, BATCHES)]
    at = names.index
    assert all(at(f"decode {context} x 1") < at(f"decode {context} x 8") < at("recording") for context in CONTEXTS)
    assert at("ledger") < at("decode 32768 x 8") < at("decode 32768 x 8, replayed") < at("decode 131072 x 1")
    assert at("decode 131072 x 8, replayed") < at("decode 8192 x 1")
    assert at("decode 8192 x 8") < at("decode 32768 x 8, alike") < at("decode sweep 32768") < at("compiled 32768")
    assert names[-1] == "headlines"
    assert [part.name for part in all_parts((256,), (4,)) if part.name.startswith("decode 256")] == [
        "decode 256 x 4",
        "decode 256 x 4, replayed",
        "decode 256 x 4, transformers alone",
        "decode 256 x 4, alike",
    ]


@pytest.mark.parametrize("name", [h.name for h in list_measurable() if h.over[2] == 8])
def test_headlines_of_eight_sequences_take_whole_steps_of_eight(name: str) -> None:
    headline = next(h for h in list_measurable() if h.name == name)
    over, under = (
        {"method": m, "context": c, "batch": b, "median": t, "peak_bytes": 1, "rates": KNOWN[m].rates}
        for (m, c, b), t in ((headline.over, 0.04), (headline.under, 0.01))
    )

    def ours(*steps: dict[str, Any]) -> float | None:
        return compare(headline, LLAMA_8B, steps, 3e12, 52e9, at_papers, "papers").ours

    assert ours(over, under) == pytest.approx(4.0)
    assert ours({**over, "batch": 1}, under) is None


def test_tables_say_how_many_sequences_and_how_they_attend(rows: dict[str, StepRow]) -> None:
    entry = Entry("decode 512 x 2", "done", "s", "c", "2026-01-02", 1.0, list(rows.values()))
    device = {"name": "Made Up 9000", "driver": "1", "clocks": "none"}
    shown = page([Result(1, False, device, {}, decode.LABEL, "2026-01-02", [], {entry.part: entry})], RateTable())
    lines = [line for line in shown.splitlines() if line.startswith("| FreeKV | 512 x 2 |")]
    assert len(lines) == 1
    assert decode.ONE_BY_ONE in lines[0]
    assert "| fused |" in lines[0]
