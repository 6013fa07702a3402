"""Part 4's whole decode steps, on the CPU with tiny shapes: the same decoder, method code, recall and replay as on a
GPU, no graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvlens.gpu.bench import decode, decoding, offloaded, recording
from kvlens.gpu.bench.device import DryDevice
from kvlens.gpu.bench.floors import DECODE_METHODS, LLAMA_8B, Rates, decode_shape, step_shape, traffic
from kvlens.gpu.bench.model import random_model, random_prompt
from kvlens.gpu.bench.part import Bench
from kvlens.gpu.bench.result import StepRow

CEILINGS = [{"kind": "ceiling", "name": name, "rate": 1e9} for name in ("device copy", "pinned to device")]
RECALLING = ("sekv", "freekv", "sentkv", "blocking")


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(DryDevice(), (256, 512), (1,), {"entries": {"ceilings": {"rows": CEILINGS}}})


@pytest.fixture(scope="module")
def rows(bench: Bench) -> dict[str, StepRow]:
    return {row.method: row for part in decode.decodes(512, 1) for row in part.run(bench)}  # type: ignore[misc]


def test_every_method_makes_whole_steps(rows: dict[str, StepRow]) -> None:
    assert list(rows) == list(DECODE_METHODS)
    for row in rows.values():
        assert row.reason is None
        assert row.scope == "decode"
        assert row.median is not None
        assert row.over_floor == pytest.approx(row.median / row.floor)  # type: ignore[operator]
        assert (row.loop is None) == (row.method == "hf_offloaded")
        assert (row.stall is not None) == (row.method in RECALLING)


def test_the_runs_own_counter_says_what_the_rates_ask_for(rows: dict[str, StepRow]) -> None:
    """Bytes that the step's plan has moved against bytes by arithmetic: equal, step for step."""
    for name in RECALLING:
        assert rows[name].counted_bytes == rows[name].host_bytes > 0, name
    assert all(rows[name].counted_bytes == 0 for name in rows if name not in (*RECALLING, "hf_offloaded"))


def test_budgets_are_kept_to(rows: dict[str, StepRow]) -> None:
    full = rows["full"].resident_bytes
    assert rows["streaming_llm"].resident_bytes < full / 5
    assert rows["sentkv"].resident_bytes < full / 2
    assert rows["chess"].resident_bytes > full


@pytest.mark.parametrize("miss", [0.25, 1.0])
def test_swept_misses_are_moved(bench: Bench, miss: float) -> None:
    row = decode.cell(bench, "freekv", 512, Rates(miss=miss, correction=0.5))
    assert row.counted_bytes == traffic(decode_shape("freekv", 512, Rates(miss=miss)), bench.model, 1).host_bytes


def test_corrected_heads_are_waited_for_and_the_others_are_not(bench: Bench) -> None:
    with torch.inference_mode():
        waited = {}
        for name, rate in (("freekv", 0.0), ("freekv", 1.0), ("blocking", 0.0)):
            made = decode.begin(bench, name, 512, Rates(correction=rate))
            made.steps(1)
            before = made.decoder.moved_bytes()
            made.steps(4)
            waited[name, rate] = (made.decoder.moved_bytes() - before).sum((1, 2)).tolist()
            made.close()
    assert waited["freekv", 0.0][0] == waited["freekv", 1.0][1] == waited["blocking", 0.0][1] == 0
    assert waited["freekv", 0.0][1] == waited["freekv", 1.0][0] == waited["blocking", 0.0][0] > 0


def test_compiled_steps_move_the_same(bench: Bench) -> None:
    for row in decode.compiled(256).run(bench):
        assert isinstance(row, StepRow)
        assert (row.reason, row.scope) == (None, "compiled")
        assert row.counted_bytes == row.host_bytes


def test_timed_launches_leave_the_decode_where_it_was(bench: Bench) -> None:
    with torch.inference_mode():
        made = decode.begin(bench, "freekv", 256, Rates())
        position = made.decoder.session.position.clone()
        assert len(made.times(False, 5)) == 5
        assert torch.equal(made.decoder.session.position, position)
        made.steps(2)
        assert int(made.decoder.session.position) == int(position) + 2
        made.close()


def test_recording_goes_through_the_rings(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = decode.begin

    def begin(*given: Any) -> Any:
        made = real(*given)
        ring = made.decoder.session.ring
        seen.append(None if ring is None else ring.spans > 0)
        return made

    monkeypatch.setattr(decode, "begin", begin)
    found = recording.measure(bench)
    assert seen == [None, False, True]
    assert [(row.recording, row.graph) for row in found] == [
        (kind, graph) for kind in recording.KINDS for graph in (False, True)
    ]
    assert all(row.added == 0 for row in found if row.recording == "off")


def test_one_methods_failure_is_its_rows_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(offloaded, "timed", fails)
    row = decode.cell(bench, "hf_offloaded", 256, Rates())
    assert row.median is None
    assert row.reason == f"The device ran out of memory: CUDA out of memory.; {decode.SMALLER}"
    monkeypatch.setattr(DryDevice, "free_bytes", lambda self: 1 << 30)
    reason = decode.cell(bench, "full", 256, Rates()).reason
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


def test_floors_of_whole_steps_differ_where_the_step_does() -> None:
    for method in ("full", "streaming_llm", "chess", "freekv", "compresskv", "blocking"):
        assert decode_shape(method, 32768, Rates()) == step_shape(method, 32768, Rates())
    assert decode_shape("full_sdpa", 32768, Rates()) == step_shape("full", 32768, Rates())
    assert (step_shape("sentkv", 32768, Rates()).wanted, decode_shape("sentkv", 32768, Rates()).wanted) == (205, 204), (
        "10 % with sinks"
    )
    found = traffic(decode_shape("sekv", 32768, Rates()), LLAMA_8B, 1)
    assert found.host_bytes == 32 * 8 * 8 * (2 * 16 * (64 + 128 + 1)) * 2, "8 of 26 spans as factors of rank 16"
    assert found.arrivals == 32 * 8 * 8 * 64 * 512, "and as tokens when they have come"
    assert found.factors == 0
