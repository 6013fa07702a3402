"""What a step lost against full KV: the arithmetic, that comparing changes nothing, and that free and forced runs agree
on it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import ListSink, NoTokenizer, makes, raises_code, random_llama, random_prompt, run, task_prompt

from kvlens import methods
from kvlens.engine.comparison import Comparison, Reference, compare
from kvlens.engine.engine import Engine

NAMES = makes()
NEW = 10


def settings_of(name: str) -> dict[str, Any]:
    chosen = methods.get(name)
    return {
        "budget": None if chosen.keeps_all else "0.2",
        "preset": "demo" if "demo" in chosen.presets else None,
        "overrides": {"keep": 0.1} if name == "chess" else {},
    }


class Case:
    def __init__(self, demo: Any) -> None:
        self.demo = demo
        self.prompt, self.task = task_prompt(demo, "multikey", 900, seed=2, max_new=NEW)
        self.read = Engine(demo).read(self.prompt, received=True)
        full = run(demo, self.prompt, "full", max_new=NEW, keep_logits=True, read=self.read)
        self.reference = Reference("", tuple(full.ids), torch.stack(full.logits))

    def run(self, name: str, **options: Any) -> Any:
        return run(self.demo, self.prompt, name, read=self.read, max_new=NEW, **settings_of(name), **options)


@pytest.fixture(scope="module")
def case(demo: Any) -> Case:
    return Case(demo)


def decode(token: int) -> str:
    return NoTokenizer().decode([token])


def test_the_arithmetic_of_a_loss() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    shift = torch.tensor([2.0, 2.0, 2.0])  # logits are log-probabilities up to a constant
    loss = compare(torch.tensor(p).log() + shift, torch.tensor(q).log(), 0, decode)
    assert loss.kl == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), abs=1e-6)
    assert (loss.top_token, loss.top_text, loss.ref_text, loss.agrees) == (1, "t1", "t0", False)
    assert loss.ref_logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert loss.logprob == pytest.approx(math.log(0.25), abs=1e-6)
    assert loss.logit_diff == pytest.approx(math.log(0.25) - math.log(0.5) - 2, abs=1e-6)
    assert loss.ref_rank == 1, "the second of two that are equally probable: the first of equals would be chosen"
    assert compare(torch.tensor([0.0, -math.inf]), torch.tensor([0.0, 1.0]), 0, decode).kl == pytest.approx(
        math.log(1 + math.e)
    )


def test_what_is_no_number_is_not_recorded_as_no_loss() -> None:
    assert math.isnan(compare(torch.tensor([0.0, 1.0]), torch.tensor([math.nan, 1.0]), 0, str).kl)


def test_the_comparison_ends_with_the_first_other_token() -> None:
    logits = torch.eye(3)
    followed = Comparison(Reference("", (0, 1, 2), logits), 3, decode)
    assert followed.step(0, logits[0], 0).agrees
    assert not followed.step(1, logits[0], 0).agrees, "the step that chose another token is still compared"
    assert followed.step(2, logits[2], 2) is None
    ended = Comparison(Reference("", (0,), logits[:1]), 3, decode)
    assert ended.step(0, logits[0], 0) is not None
    assert ended.step(1, logits[0], 0) is None, "the reference has ended"


def test_full_kv_against_itself_lost_nothing(case: Case) -> None:
    for options in ({}, {"forced": case.reference.ids, "planned": NEW}):
        result = case.run("full", against=case.reference, **options)
        assert len(result.losses) == len(case.reference.ids)
        assert all(
            loss.kl == 0 and loss.agrees and loss.ref_rank == 0 and loss.logit_diff == 0 for loss in result.losses
        )


@pytest.mark.parametrize("name", NAMES)
def test_comparing_changes_nothing_and_is_recorded(case: Case, name: str) -> None:
    sink = ListSink()
    plain = case.run(name, keep_logits=True)
    compared = case.run(name, keep_logits=True, against=case.reference, sink=sink)
    assert plain.ids == compared.ids
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, compared.logits, strict=True))
    assert [record.loss for record in sink.steps] == compared.losses
    assert plain.losses == []


@pytest.mark.parametrize("name", NAMES)
def test_a_free_run_and_its_forced_repeat_lose_at_the_same_step(case: Case, name: str) -> None:
    free = case.run(name, against=case.reference)
    forced = case.run(name, against=case.reference, forced=case.reference.ids, planned=NEW)
    assert None not in forced.losses
    assert tuple(forced.ids) == case.reference.ids
    first = next((i for i, loss in enumerate(forced.losses) if not loss.agrees), None)
    common = len(forced.losses) if first is None else first + 1
    assert free.losses[:common] == forced.losses[:common]
    assert all(loss is None for loss in free.losses[common:]), "after the first divergence the contexts differ"
    if first is not None:
        assert free.ids[:first] == list(case.reference.ids[:first])
        assert free.ids[first] == forced.losses[first].top_token != case.reference.ids[first]


def test_some_method_loses_in_this_case(case: Case) -> None:
    """Without a loss the tests above would say little."""
    result = case.run("streaming_llm", against=case.reference)
    assert any(loss is not None and not loss.agrees for loss in result.losses)


def test_a_reference_of_another_vocabulary_is_refused() -> None:
    model, prompt = random_llama(), random_prompt(40)
    reference = Reference("", (1, 2), torch.zeros(2, 300))
    with raises_code("other_vocabulary"):
        run(model, prompt, "full", max_new=2, against=reference)
