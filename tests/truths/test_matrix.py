"""Every registered method against the truths of evidence/design.md. A method is in the matrix because it is registered,
nothing else; beside them, settings with which a method asks of the engine what no other does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from support import ListSink, Prompts, method_of, preset_of, random_llama, random_prompt, run, share_of

from kvlens import methods
from kvlens.budget import BudgetInfeasible
from kvlens.checking import truths
from kvlens.memory.memory import Memory

SETTINGS = ("streaming_llm positions=cache", "keydiff block=100", "sekv zones=layer", "sekv zones=model")
NAMES = [*methods.registry(), *SETTINGS]
NEW = 24
TASK_TOKENS = 1024


@contextmanager
def memories() -> Iterator[list[weakref.ref[Memory]]]:
    """Yield the memories that runs take inside, while nobody looks for cycles of garbage."""
    taken: list[weakref.ref[Memory]] = []
    take = Memory.__init__

    def note(memory: Memory, *arguments: Any, **settings: Any) -> None:
        taken.append(weakref.ref(memory))
        take(memory, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "__init__", note)
        gc.disable()
        try:
            yield taken
        finally:
            gc.enable()


class Runs:
    """Per method, on the demo model, made when first asked for: (recorded result, sink, unrecorded result)."""

    def __init__(self, demo: Any, prompts: Prompts) -> None:
        self._demo, self._prompts = demo, prompts
        self._made: dict[str, Any] = {}
        self.memories: dict[str, list[bool]] = {}
        """by method: of each memory that its runs took, whether it was given back when they had ended"""

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            prompt = self._prompts.task("multikey", TASK_TOKENS)
            sink = ListSink()
            settings = {"budget": share_of(name), "preset": preset_of(name), "max_new": NEW, "keep_logits": True}
            with memories() as taken:
                recorded = run(self._demo, prompt, name, sink=sink, coverage=True, **settings)
                self._made[name] = (recorded, sink, run(self._demo, prompt, name, **settings))
                self.memories[name] = [memory() is None for memory in taken]
        return self._made[name]


@pytest.fixture(scope="module")
def runs(demo: Any, prompts: Prompts) -> Runs:
    return Runs(demo, prompts)


@pytest.fixture(scope="module")
def narrow() -> tuple[Any, Prompts]:
    """A random model in bfloat16."""
    model = random_llama()
    model.model.to(torch.bfloat16)
    model.shape = type(model.shape)(**{**model.shape.__dict__, "itemsize": 2})
    return model, Prompts(model)


@pytest.mark.parametrize("name", NAMES)
def test_recording_changes_nothing(runs: Runs, name: str) -> None:
    recorded, _, plain = runs[name]
    assert recorded.ids == plain.ids
    assert truths.same_logits(recorded.logits, plain.logits) is None


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_given_back_without_looking_for_garbage(runs: Runs, name: str) -> None:
    """A cycle of objects would keep a run's KV beside the next run's, until Python looks for garbage."""
    assert runs[name]
    assert runs.memories[name] == [True, True]


@pytest.mark.parametrize("name", NAMES)
def test_recording_changes_nothing_in_bfloat16(narrow: tuple[Any, Prompts], name: str) -> None:
    model, prompts = narrow
    prompt = random_prompt(900, seed=3)
    untrained = method_of(name).untrained  # what the demo preset names was trained for the demo model only
    settings = {
        "budget": share_of(name, "0.5"),
        "preset": preset_of(name),
        "max_new": 12,
        "keep_logits": True,
        "overrides": untrained,
        "read": prompts.read(prompt, name),
    }
    recorded = run(model, prompt, name, sink=ListSink(), coverage=True, **settings)
    plain = run(model, prompt, name, **settings)
    assert recorded.ids == plain.ids
    assert truths.same_logits(recorded.logits, plain.logits) is None


@pytest.mark.parametrize("name", NAMES)
def test_masses_add_up_and_no_row_is_missing(runs: Runs, demo: Any, name: str) -> None:
    result, sink, _ = runs[name]
    assert len(sink.steps) == len(result.ids) > 0
    assert truths.masses_add_up(sink.steps, demo.shape) is None
    assert all(check.passed for check in result.checks), result.checks


@pytest.mark.parametrize("name", NAMES)
def test_decisions_say_what_columns_say(runs: Runs, demo: Any, name: str) -> None:
    _, sink, _ = runs[name]
    assert truths.decisions_agree(sink.steps, demo.shape) is None


@pytest.mark.parametrize("name", NAMES)
def test_spans_partition_the_positions(runs: Runs, name: str) -> None:
    _, sink, _ = runs[name]
    assert truths.spans_partition(sink) is None


@pytest.mark.parametrize("name", NAMES)
def test_bytes_in_the_ledger_are_the_bytes_logged(runs: Runs, name: str) -> None:
    _, sink, _ = runs[name]
    assert truths.ledger_bytes(sink) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_kv_heads_hold_and_read_adds_up(runs: Runs, demo: Any, name: str) -> None:
    _, sink, _ = runs[name]
    assert truths.bytes_add_up(sink.steps, demo.shape) is None


@pytest.mark.parametrize("name", NAMES)
def test_budget_is_kept_at_every_step(runs: Runs, demo: Any, name: str) -> None:
    result, sink, _ = runs[name]
    tokens = len(sink.prefilled.tokens)
    limit = int(demo.shape.full_kv_bytes(tokens + NEW) * 0.2)
    chosen = method_of(name)
    if share_of(name) is None:
        limit = chosen.floor_bytes(methods.make_parameters(chosen, preset_of(name), {}), demo.shape, tokens - 1, NEW)
    assert truths.within_budget(sink.steps, limit) is None
    assert result.peak_bytes == max(record.peak_bytes for record in sink.steps)
    assert sink.steps[-1].resident_bytes <= sink.steps[0].resident_bytes, "what an answer takes is taken before it"


@pytest.mark.parametrize("name", NAMES)
def test_an_impossible_budget_is_refused_with_the_smallest_feasible(demo: Any, prompts: Prompts, name: str) -> None:
    prompt = prompts.task("needle", 512)
    settings = {"preset": preset_of(name), "max_new": 8, "read": prompts.read(prompt, name)}
    with pytest.raises(BudgetInfeasible) as refused:
        run(demo, prompt, name, budget="2tok", **settings)
    assert "budget_infeasible" in str(refused.value)
    smallest = refused.value.smallest
    assert smallest > demo.shape.token_bytes * 2
    result = run(demo, prompt, name, budget=f"{smallest}B", **settings)
    assert result.peak_bytes <= smallest
    with pytest.raises(BudgetInfeasible):
        run(demo, prompt, name, budget=f"{smallest - 1}B", **settings)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_trace(runs: Runs, demo: Any, prompts: Prompts, name: str) -> None:
    """Whether the run has read the prompt or was given it."""
    _, first, _ = runs[name]
    prompt, second = prompts.task("multikey", TASK_TOKENS), ListSink()
    settings = {"budget": share_of(name), "preset": preset_of(name), "max_new": NEW, "coverage": True}
    run(demo, prompt, name, sink=second, read=prompts.read(prompt, name), **settings)
    assert truths.same_trace(first, second) is None


@pytest.mark.parametrize("name", NAMES)
def test_not_recorded_is_absent_and_never_zero(demo: Any, prompts: Prompts, name: str) -> None:
    prompt, sink = prompts.task("needle", 512), ListSink()
    settings = {"budget": share_of(name, "0.4"), "preset": preset_of(name), "max_new": 4}
    run(demo, prompt, name, sink=sink, read=prompts.read(prompt, name), **settings)
    assert "coverage" not in sink.steps[0].head
    assert "qcos" not in sink.steps[0].head, "there is no previous query at step 0"
    assert "qcos" in sink.steps[1].head
    assert sink.prefilled.tokens[0].surprisal is None


@pytest.fixture(scope="module")
def unlimited(demo: Any, prompts: Prompts) -> Any:
    """FullKV."""
    prompt = prompts.task("needle", 512)
    return run(demo, prompt, "full", max_new=12, keep_logits=True, read=prompts.read(prompt, "full"))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_limit_it_equals_full_or_states_its_error(
    demo: Any, prompts: Prompts, unlimited: Any, name: str
) -> None:
    prompt = prompts.task("needle", 512)
    settings = {"forced": tuple(unlimited.ids), "keep_logits": True, "read": prompts.read(prompt, name)}
    other = run(demo, prompt, name, preset=preset_of(name), **settings)
    gaps = [float((a - b).abs().max()) for a, b in zip(unlimited.logits, other.logits, strict=True)]
    if method_of(name).exact_without_budget:
        assert max(gaps) == 0
    else:
        print(f"{name} without a budget limit: largest logit difference to FullKV {max(gaps):.3g}")
        assert np.isfinite(gaps).all()


@pytest.mark.parametrize("name", NAMES)
def test_forced_decoding_follows_the_given_tokens(demo: Any, prompts: Prompts, name: str) -> None:
    prompt, forced = prompts.task("needle", 512), (10, 20, 30, 40, 50, 60)
    settings = {"budget": share_of(name, "0.4"), "preset": preset_of(name), "read": prompts.read(prompt, name)}
    result = run(demo, prompt, name, forced=forced, **settings)
    assert tuple(result.ids) == forced
    assert result.stopped == "forced"
