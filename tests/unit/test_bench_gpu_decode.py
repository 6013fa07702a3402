"""Whole decode steps of `kvlens bench gpu`, on the CPU with tiny shapes: the same decoder, method code, recall and
replay as on a GPU, no graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvlens import methods
from kvlens.lab.gpu import decode, decode_parts, decoding, plain, recording
from kvlens.lab.gpu.device import DryDevice
from kvlens.lab.gpu.model import random_model, random_prompt
from kvlens.lab.gpu.part import Bench
from kvlens.lab.gpu.rates import RateTable
from kvlens.lab.gpu.report import page
from kvlens.lab.gpu.settings import BASELINES, Setting, everything, settings
from kvlens.lab.gpu.settings import plain as plain_setting
from kvlens.lab.results.gpu import StepRow

pytestmark = pytest.mark.usefixtures("quick_gc")

CEILINGS = [{"kind": "ceiling", "name": name, "rate": 1e9} for name in ("device copy", "pinned to device")]
KNOWN = everything()
RECALLING = tuple(name for name, setting in settings().items() if setting.rates)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(DryDevice(), (256, 512), (1,), {"entries": {"ceilings": {"rows": CEILINGS}}})


@pytest.fixture(scope="module")
def rows(bench: Bench) -> dict[str, StepRow]:
    return {row.method: row for part in decode_parts.decodes(512, 1) for row in part.run(bench)}  # type: ignore[misc]


@pytest.mark.slow
def test_every_method_makes_whole_steps(rows: dict[str, StepRow]) -> None:
    assert sorted(rows) == sorted(KNOWN)
    assert {setting.method for setting in settings().values()} == {
        name for name, method in methods.registry().items() if method.static_ready
    }
    for row in rows.values():
        assert row.reason is None
        assert row.scope == "decode"
        assert row.median is not None
        assert row.over_floor == pytest.approx(row.median / row.floor)  # type: ignore[operator]
        assert (row.loop is None) == (row.method in BASELINES)
        assert (row.stall is not None) == (row.method in RECALLING)


def test_the_runs_own_counter_says_what_the_rates_ask_for(rows: dict[str, StepRow]) -> None:
    """Bytes that the step's plan has moved against bytes by arithmetic: equal, step for step."""
    for name in RECALLING:
        assert rows[name].counted_bytes == rows[name].host_bytes > 0, name
    assert all(rows[name].counted_bytes == 0 for name in rows if name not in (*RECALLING, *BASELINES))


def test_budgets_are_kept_to(rows: dict[str, StepRow]) -> None:
    full = rows["full"].resident_bytes
    assert rows["streaming_llm"].resident_bytes < full / 5
    assert rows["sentkv"].resident_bytes < full / 2
    assert rows["chess"].resident_bytes > full


@pytest.mark.parametrize("miss", [0.25, 1.0])
def test_swept_misses_are_moved(bench: Bench, miss: float) -> None:
    row = decode.cell(bench, KNOWN["freekv"], 512, {"miss": miss, "correction": 0.5})
    assert row.counted_bytes == row.host_bytes
    assert row.host_bytes == bench.model.kv.layers * bench.model.kv.kv_heads * round(miss * 4) * 32 * 512


def test_corrected_heads_are_waited_for_and_the_others_are_not(bench: Bench) -> None:
    with torch.inference_mode():
        waited = {}
        for name, rates in (("freekv", {"correction": 0.0}), ("freekv", {"correction": 1.0}), ("blocking", {})):
            made = decoding.begin(bench, KNOWN[name], 512, {**KNOWN[name].rates, **rates})
            made.steps(1)
            before = made.decoder.moved_bytes()
            made.steps(4)
            waited[name, rates.get("correction")] = (made.decoder.moved_bytes() - before).sum((1, 2)).tolist()
            made.close()
    assert waited["freekv", 0.0][0] == waited["freekv", 1.0][1] == waited["blocking", None][1] == 0
    assert waited["freekv", 0.0][1] == waited["freekv", 1.0][0] == waited["blocking", None][0] > 0


@torch.inference_mode()
def test_every_step_misses_exactly_so_many_and_the_pattern_closes(bench: Bench) -> None:
    for name in ("freekv", "blocking"):
        made = decoding.begin(bench, KNOWN[name], 1024, {**KNOWN[name].rates, "miss": 0.5})
        replay, kept = made.replays[0], []
        for _ in range(replay.order.shape[1]):
            replay.next(replay.fine.shape[2])
            kept.append(replay.requested.clone())
            for head, now in enumerate(replay.requested.tolist()):
                assert len(set(now)) == replay.wanted
                assert len(set(now) - set(replay.before[head].tolist())) == replay.missed == replay.wanted // 2
        replay.next(replay.fine.shape[2])
        assert torch.equal(replay.requested, kept[0]), "after as many steps as there are spans it comes again"
        assert bool((replay.requested == replay.requested[:1]).all()) == (name == "blocking")
        made.close()


def test_compiled_steps_move_the_same(bench: Bench) -> None:
    """Those that are made in every way; that a method's step compiles whole is tests/static/test_compiled.py's to
    show."""
    rows = list(decode_parts.compiled(512).run(bench))
    assert [row.method for row in rows if isinstance(row, StepRow)] == [
        each.name for each in decode_parts.compared(bench)
    ]
    for row in rows:
        assert isinstance(row, StepRow)
        assert (row.reason, row.scope) == (None, "compiled")
        assert row.counted_bytes == row.host_bytes


def test_one_call_compiles_as_many_methods_as_there_are(bench: Bench) -> None:
    """torch compiles one function a few times at most, and every method's step is another of it."""
    # by torch's own patch: setting an entry and setting it back hides it
    with torch._dynamo.config.patch(recompile_limit=1):
        for name in ("full", "streaming_llm"):
            row = decode.cell(bench, KNOWN[name], 512, {}, "compiled")
            assert row.reason is None


def test_a_method_that_says_nothing_runs_by_its_own_decisions(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows have what it moved by its own count, and no floor where it does not say what a step moves."""
    quiet = {name: plain_setting(name, methods.get(name)) for name in ("streaming_llm", "sentkv")}
    found = {name: decode.cell(bench, setting, 512, {}) for name, setting in quiet.items()}
    assert {name: row.reason for name, row in found.items()} == {"streaming_llm": None, "sentkv": None}
    assert found["streaming_llm"].floor is not None
    row = found["sentkv"]
    assert (row.floor, row.over_floor, row.host_bytes, row.device_bytes, row.rates_from) == (None,) * 4 + ("none",)
    assert decode.UNKNOWN in row.note
    assert row.counted_bytes is not None
    assert row.counted_bytes > 0
    monkeypatch.setattr("kvlens.lab.gpu.settings.settings", lambda: quiet)
    shown = page([], RateTable())
    assert "| SentKVCompress | `sentkv` | 10% of full KV, or the least" in shown
    assert "FreeKV against" not in shown, "nothing is claimed of bytes that nobody knows"


def test_timed_launches_leave_the_decode_where_it_was(bench: Bench) -> None:
    with torch.inference_mode():
        made = decoding.begin(bench, KNOWN["freekv"], 256, KNOWN["freekv"].rates)
        position = made.decoder.session.position.clone()
        assert len(made.times(False, 5)) == 5
        assert torch.equal(made.decoder.session.position, position)
        made.steps(2)
        assert int(made.decoder.session.position) == int(position) + 2
        made.close()


def test_recording_goes_through_the_rings(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = decoding.begin

    def begin(*given: Any) -> Any:
        made = real(*given)
        ring = made.decoder.session.ring
        seen.append(None if ring is None else ring.spans > 0)
        return made

    monkeypatch.setattr(recording, "begin", begin)
    found = recording.measure(bench)
    assert seen == [None, False, True]
    assert [(row.recording, row.graph) for row in found] == [
        (kind, graph) for kind in recording.KINDS for graph in (False, True)
    ]
    assert all(row.added == 0 for row in found if row.recording == "off")
    assert {row.method for row in found} == {"freekv"}, "which recalls before its attention and after it"


def test_one_methods_failure_is_its_rows_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(plain, "timed", fails)
    row = decode.cell(bench, KNOWN["hf_offloaded"], 256, {})
    assert row.median is None
    assert row.reason == f"The device ran out of memory: CUDA out of memory.; {decode.SMALLER}"
    monkeypatch.setattr(DryDevice, "free_bytes", lambda self: 1 << 30)
    reason = decode.cell(bench, KNOWN["full"], 256, {}).reason
    assert reason is not None
    assert reason.startswith(
        "does not fit: needs 4.3 GB beside the weights, 1.1 GB free; leave the longest context out"
    )


def test_host_memory_that_does_not_suffice_is_said(bench: Bench) -> None:
    with pytest.raises(MemoryError):
        decoding.host_memory(bench, 2, (1 << 40, 2), torch.bfloat16)


def test_layers_share_the_pool_only_where_they_must(bench: Bench) -> None:
    parts = decoding.host_memory(bench, 2, (64, 2, 2, 32, 128), torch.bfloat16)
    assert parts[0].data_ptr() + parts[0].nbytes <= parts[1].data_ptr()


def test_the_model_has_the_benchmarks_shape(bench: Bench) -> None:
    loaded = bench.keep_alone("model", lambda: random_model(bench))
    matrices = sum(p.numel() for name, p in loaded.model.named_parameters() if p.dim() == 2 and "embed" not in name)
    assert matrices * 2 == bench.model.weight_bytes
    assert loaded.model.dtype == torch.bfloat16
    prompt, read = random_prompt(bench, 256)
    assert read.ids == prompt.ids
    assert read.keys.shape == (bench.model.kv.layers, bench.model.kv.kv_heads, 255, bench.model.kv.head_dim)


def test_two_settings_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Said:
        SETTINGS: tuple[Setting, ...] = (KNOWN["full"], KNOWN["full"])

    monkeypatch.setattr("kvlens.lab.gpu.settings.part", lambda method, name, room: Said)
    settings.cache_clear()
    try:
        with pytest.raises(ValueError, match="two settings of the GPU bench are called 'full'; rename one"):
            settings()
    finally:
        settings.cache_clear()
