"""What a run takes in memory: said before the run, refused beyond what is free, and held to few copies of the KV."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import ListSink, measured_batches, method_of, random_prompt
from torch.profiler import ProfilerActivity, profile

from kvlens.engine.engine import Engine, Options
from kvlens.engine.holdings import SMALL, Mark
from kvlens.methods.fitting import Sizes
from kvlens.recording import recorder, sampling
from kvlens.recording.facts import span_keys
from kvlens.recording.fullattention import FullAttention, sum_by
from kvlens.recording.measure import masses_of_all
from kvlens.recording.recorder import IN_FLIGHT
from kvlens.rows import SpanRow
from kvlens.runs import memory
from kvlens.runs.memory import (
    RunBeyondMemory,
    check_batch_memory,
    check_race_memory,
    check_run_memory,
    memory_need,
    race_need,
)
from kvlens.runs.preflight import estimate, refuse
from kvlens.runs.request import RunRequest
from kvlens.shape import KVShape
from kvlens.text.prompts import PromptText
from kvlens.tiers.slots import FREE

SIZES = Sizes(KVShape(32, 32, 8, 128, 2), 32_000, 63, None)


def kv_copies(**fields: Any) -> float:
    """Return a run's memory as a multiple of its full KV, without the masses."""
    request = RunRequest(model="demo", oracle="off", **fields)
    shape, tokens = SIZES.shape, SIZES.prompt_tokens + 1 + SIZES.max_new
    limit = round(SIZES.full_kv_bytes / 5) if fields.get("method") not in ("full", None) else None
    need = memory_need(request, Sizes(shape, SIZES.prompt_tokens, SIZES.max_new, limit))
    return (need.total - 4 * shape.layers * shape.q_heads * tokens) / need.full_kv


def test_a_run_holds_its_prompt_and_its_slots() -> None:
    assert kv_copies(method="full") == pytest.approx(2)
    assert kv_copies(method="snapkv", coverage=False) == pytest.approx(1.2)
    assert kv_copies(method="snapkv") == pytest.approx(1.2)
    assert kv_copies(method="quest") == pytest.approx(2)
    assert kv_copies(method="freekv") == pytest.approx(2.2)
    assert kv_copies(method="snapkv", against=True) == pytest.approx(2)
    assert kv_copies(method="quest", against=True) == pytest.approx(2)
    assert kv_copies(method="freekv", against=True) == pytest.approx(2.2)
    assert kv_copies(method="criticalkv", against=True) == pytest.approx(2.2)


@pytest.mark.parametrize(("layers", "prompt_tokens", "together"), [(32, 8157, 1), (8, 8157, 3), (2, 512, 8)])
def test_tables_of_the_steps_that_are_measured_together_count(layers: int, prompt_tokens: int, together: int) -> None:
    request = RunRequest(model="demo", method="snapkv", coverage=True)
    table = 4 * layers * 32 * (prompt_tokens + 8)
    need = memory_need(request, Sizes(KVShape(layers, 32, 8, 64, 4), prompt_tokens, 7, None))
    assert need.masses == table * together * memory.MASS_TABLES


def test_effects_of_a_compared_run_count() -> None:
    sizes = Sizes(KVShape(8, 32, 8, 64, 4), 8157, 200, None)
    fields = {"model": "demo", "method": "snapkv", "coverage": True}
    alone, compared = (memory_need(RunRequest(**fields, against=against), sizes) for against in (False, True))
    assert (alone.effects, compared.effects) == (0, 64 * memory.EFFECT_BYTES * 32 * (8157 + 1 + 200))
    assert compared.total == max(2 * compared.full_kv + compared.masses, compared.full_kv + compared.effects)


def test_a_run_beyond_memory_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    request, prompt = RunRequest(model="demo", method="snapkv", max_new=8), PromptText("the red key " * 40)
    need = refuse(request, prompt)
    assert need is not None
    assert estimate(prompt, "demo", "snapkv", {}, None, 8)["memory_bytes"] == need.total
    monkeypatch.setattr(memory, "is_kept", lambda request: True)
    monkeypatch.setattr(memory, "host_bytes", lambda: need.total - 1)
    with pytest.raises(RunBeyondMemory) as refused:
        refuse(request, prompt)
    assert (refused.value.code, refused.value.needed, refused.value.free) == (
        "run_beyond_memory",
        need.total,
        need.total - 1,
    )
    monkeypatch.setattr(memory, "host_bytes", lambda: need.total)
    assert refuse(request, prompt) == need


def test_weights_that_are_still_to_be_loaded_count(monkeypatch: pytest.MonkeyPatch) -> None:
    request = RunRequest(model="demo")
    sizes = Sizes(KVShape(2, 4, 2, 16, 4), 100, 8, None)
    monkeypatch.setattr(memory, "is_kept", lambda request: False)
    monkeypatch.setattr(memory, "host_bytes", lambda: memory_need(request, sizes).total)
    with pytest.raises(RunBeyondMemory):
        check_run_memory(request, sizes)
    monkeypatch.setattr(memory, "host_bytes", lambda: None)
    need = check_run_memory(request, sizes)
    assert need is not None
    assert need.sentence == ""


def test_a_run_on_a_gpu_has_no_estimate_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: 1)
    assert check_run_memory(RunRequest(model="demo", method="full", device="cuda:0"), SIZES) is None


def test_the_lanes_of_a_race_need_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        RunRequest(model="demo", method=name, against=True, oracle="off") for name in ("quest", "h2o", "freekv")
    ]
    needs = [memory_need(request, SIZES) for request in requests]
    need = race_need(needs)
    assert need.total == need.full_kv + sum(each.lane_bytes for each in needs) + needs[0].masses
    assert need.total > max(each.total for each in needs)
    monkeypatch.setattr(memory, "is_kept", lambda request: True)
    monkeypatch.setattr(memory, "host_bytes", lambda: need.total - 1)
    with pytest.raises(RunBeyondMemory) as refused:
        check_race_memory(requests[0], [*needs, None])
    assert (refused.value.needed, refused.value.lanes) == (need.total, 3)
    check_race_memory(requests[0], [*needs[1:], None])
    check_race_memory(requests[0], [None])


def test_the_runs_of_a_batch_need_what_each_needs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    request = RunRequest(model="demo", method="quest", against=True)
    needs = [memory_need(request, replace(SIZES, prompt_tokens=tokens)) for tokens in (4_000, 9_000, 6_000)]
    total = sum(need.total for need in needs)
    monkeypatch.setattr(memory, "is_kept", lambda request: True)
    monkeypatch.setattr(memory, "host_bytes", lambda: total - 1)
    with pytest.raises(RunBeyondMemory) as refused:
        check_batch_memory(request, needs)
    assert (refused.value.needed, refused.value.prompts, refused.value.tokens) == (total, 3, needs[1].tokens)
    check_batch_memory(request, needs[:2])


def test_a_long_run_says_what_it_takes() -> None:
    assert memory_need(RunRequest(model="demo", method="full"), SIZES).sentence


def largest_allocation(work: Any) -> int:
    """Return the bytes of the largest tensor that is made meanwhile."""
    return max(allocations(work))


def allocations(work: Any) -> list[int]:
    """Return the bytes that each operation takes meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    return [event.self_cpu_memory_usage for event in profiled.events()]


def test_marking_a_prompt_widens_a_part_of_it_at_a_time() -> None:
    with torch.inference_mode():
        keys = torch.randn(16, 2, 600, 16)
    assert keys.numel() > SMALL
    assert largest_allocation(lambda: Mark.take(keys)) <= keys.nbytes // 8
    part = 8 * keys[0].numel()
    assert part == 8 * keys[..., 0].numel()
    large = [size for size in allocations(lambda: Mark.take(keys)) if size >= part]
    assert len(large) == 2, "the sums along the last dimension, and one room in which all parts are widened"


@pytest.mark.parametrize("size", [(16, 2, 600, 16), (900, 400), (400_000,)])
def test_a_marks_sums_are_made_before_the_first_sum(size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A small result between two widened copies would keep the allocator from using the room of the first again."""
    with torch.inference_mode():
        keys = torch.randn(size)
    calls: list[str] = []
    for name in ("empty", "sum"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, partial(_noted, calls, name, plain))
    mark = Mark.take(keys)
    results = min(len(size), 2)
    assert calls[:results] == ["empty"] * results
    assert set(calls[results:]) == {"sum"}
    bits = keys.view(torch.int32)
    for made, dim in zip(mark.bits, range(-results, 0), strict=True):
        assert torch.equal(made, bits.sum(dim))
    assert not mark.changed()
    with torch.inference_mode():
        keys[..., -1] += 1
    assert mark.changed()


def _noted(calls: list[str], name: str, plain: Any, *values: Any, **options: Any) -> Any:
    calls.append(name)
    return plain(*values, **options)


def test_masses_of_a_run_that_keeps_all_are_made_layer_by_layer(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They equal those of a table of all layers, and no tensor of all layers' weights is made."""
    batches = measured_batches(monkeypatch)
    method = method_of("full")
    options = Options(max_new=4, ignore_eos=True, coverage=True)
    Engine(tiny).run(random_prompt(2_000, seed=3), method, method.Parameters(), None, options, ListSink())
    with torch.inference_mode():
        for shots in batches:
            weights = FullAttention(shots).layers(0, len(shots[0].q)).movedim(2, 0)
            role, span = (getattr(shots[-1].groups[0], name)[0, 0].long() for name in ("role", "span"))
            wanted = (
                sum_by(weights, role, FREE + 1).flatten(2, 3),
                sum_by(weights, span, shots[0].spans).flatten(2, 3),
                torch.special.entr(weights.double()).sum(-1).flatten(2, 3).float(),
            )
            for made, old in zip(masses_of_all(shots), wanted, strict=False):
                torch.testing.assert_close(made, old, atol=1e-5, rtol=1e-5)
            layers = weights.shape[1]
            assert layers > 1
            assert largest_allocation(lambda part=shots: masses_of_all(part)) <= weights.nbytes / layers


@pytest.mark.parametrize(("numbers", "most"), [(1, 0), (1 << 40, IN_FLIGHT)])
def test_steps_whose_tables_are_large_do_not_wait_in_a_row(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, numbers: int, most: int
) -> None:
    """A large step is handed over when nothing is measured any more; small ones wait in a row."""
    unmeasured: list[int] = []
    measure, row_is_full = recorder.measure, threading.Event()

    class Noted(queue.Queue[Any]):
        def put(self, item: Any, *rest: Any) -> None:
            if item is not None:
                unmeasured.append(self.unfinished_tasks)
            if len(unmeasured) > IN_FLIGHT + 1:
                row_is_full.set()
            super().put(item, *rest)

    def measure_slowly(*arguments: Any) -> Any:
        row_is_full.wait(60 if most else 0.05)
        return measure(*arguments)

    monkeypatch.setattr(recorder, "TOGETHER_NUMBERS", numbers)
    monkeypatch.setattr(recorder, "measure", measure_slowly)
    monkeypatch.setattr(recorder.queue, "Queue", Noted)
    monkeypatch.setattr(sampling, "TOGETHER", 1)
    method, sink = method_of("snapkv"), ListSink()
    options = Options(max_new=6, ignore_eos=True)
    Engine(tiny).run(random_prompt(100, seed=3), method, method.Parameters(tokens=40), None, options, sink)
    assert len(sink.steps) == len(unmeasured) == 6
    assert max(unmeasured) == (most + 1 if most else 0)


def test_mean_keys_of_spans_are_made_head_by_head() -> None:
    keys = torch.randn(4, 4, 600, 16)
    rows = [SpanRow(1, "page", 0, 300, -1, ""), SpanRow(2, "page", 300, 600, -1, "")]
    sizes = largest_allocation(lambda: span_keys(keys, rows, lambda part, positions, layer, back: part.clone()))
    assert sizes <= keys.nbytes // 16
    means = span_keys(keys, rows, None)
    assert means is not None
    torch.testing.assert_close(torch.from_numpy(means.keys), keys.unflatten(2, (2, 300)).mean(3))


def test_a_run_of_a_reading_writes_no_store_of_its_own(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt, method = Engine(tiny), random_prompt(200, seed=3), method_of("snapkv")
    read = engine.read(prompt)
    filled: list[torch.Tensor] = []
    zeros = torch.zeros

    def count_zeros(*size: Any, **options: Any) -> torch.Tensor:
        filled.append(tensor := zeros(*size, **options))
        return tensor

    monkeypatch.setattr(torch, "zeros", count_zeros)
    engine.run(prompt, method, method.Parameters(tokens=40), None, Options(max_new=2, ignore_eos=True), read=read)
    assert max(tensor.nbytes for tensor in filled) < read.keys.nbytes
