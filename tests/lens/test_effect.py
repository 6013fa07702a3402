"""The effect of spans on a lost choice: against finite differences in float64, and on a model made by hand in which one
KV head carries the fact and every other looks elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lookup_model
import numpy as np
import pytest
import support
import torch

from kvlens.engine import effect
from kvlens.engine.comparison import Reference
from kvlens.engine.effect import FullAttention, effects
from kvlens.engine.engine import Engine
from kvlens.engine.ranking import Records
from kvlens.instruments import Effects, Loss, Oracle
from kvlens.lens.attribution import attribute_records
from kvlens.rows import SpanRow
from kvlens.runs.carrying import carry_out
from kvlens.runs.effects import TOO_LONG, UNRECORDED
from kvlens.runs.request import RunRequest
from kvlens.shortage import shortage
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import Prompt, PromptText

IDS = (7, 11, 13, 17, 19, 23)
SPANS = [SpanRow(0, "window", 30, 41, -1, ""), *(SpanRow(i, "page", 10 * i - 10, 10 * i, -1, "") for i in (1, 2, 3))]
EPSILON = 1e-4


def loss(ref: int, top: int) -> Loss:
    return Loss(ref, "", top, "", ref == top, 1.0, -1.0, -2.0, -1.0, 1)


def listed(share: float, seed: int) -> Oracle:
    """Every head lists spans 0 to 3; of each the method left `share` unread, of some nothing."""
    shape = (3, 8, 4)
    draw = np.random.default_rng(seed)
    full = np.full(shape, 0.25, np.float32)
    unread = full * share * draw.integers(0, 2, shape)
    span = np.broadcast_to(np.arange(4, dtype=np.int32), shape).copy()
    return Oracle(span, full, full.copy(), np.zeros(shape[:2], np.float32), unread.astype(np.float32))


def doubled(model: Any) -> None:
    """In float64, the norms too, which transformers computes in float32."""

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)

    model.double()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(norm, module)


class Nudged(FullAttention):
    """One KV head's output has EPSILON times more taken away of what was not read of one span, computed by masking."""

    at: tuple[int, int, int]
    by: float
    begin: int
    oracles: list[Oracle]

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        output = super().attend(layer, q, scaling)
        if layer != self.at[0] or not torch.is_grad_enabled():
            return output
        (_, head, span), n = self.at, self.tokens_seen(layer)
        keys = torch.cat([self.prompt_keys[layer], self.keys[layer]], 1)[head]
        values = torch.cat([self.prompt_values[layer], self.values[layer]], 1)[head]
        rows, m, moved = {row.span: row for row in SPANS}, q.shape[2], output.clone()
        for i, q_head in itertools.product(range(m), range(4 * head, 4 * head + 4)):
            oracle = self.oracles[self.begin + i]
            assert oracle.unread is not None
            share = torch.zeros(n, dtype=torch.float64)
            for row in (rows[0], rows[1], rows[2], rows[3]):
                place = slice(row.tok_start, n if row.span == 0 else row.tok_end)
                share[place] = float(oracle.unread[layer, q_head, row.span] / oracle.full[layer, q_head, row.span])
            scores = keys @ q[0, q_head, i] * scaling
            scores[n - m + i + 1 :] = -torch.inf
            weights = scores.softmax(0)
            left = ((1 - share) * weights / ((1 - share) * weights).sum()) @ values
            own = slice(rows[span].tok_start, n if span == 0 else rows[span].tok_end)
            moved[0, q_head, i] -= self.by * (share * weights)[own] @ (values[own] - left)
        return moved


def case(seed: int) -> tuple[Any, Any, Reference, list[Any], list[Oracle]]:
    """A random model, a prompt it has read, and five steps of which the last is lost; all in float64."""
    model = support.random_llama(seed, head_dim=16)
    doubled(model.model)
    prompt = support.random_prompt(35, 1)
    oracles = [listed(0.7, step) for step in range(5)]
    steps: list[Any] = [(loss(i, i), oracle) for i, oracle in zip(IDS, oracles[:4], strict=False)]
    steps.append((loss(IDS[4], 99), oracles[4]))
    return model, Engine(model).read(prompt), Reference("", IDS, chosen(IDS)), steps, oracles


def chosen(ids: tuple[int, ...]) -> torch.Tensor:
    """Logits whose most probable tokens are these."""
    return torch.nn.functional.one_hot(torch.tensor(ids), 512).float()


def lead_at(monkeypatch: pytest.MonkeyPatch, made: Any, way: float, *asked: Any) -> float:
    """Of the lost step, at a point of the way."""
    seen: list[float] = []
    grad = torch.autograd.grad

    def watched(lead: torch.Tensor, *rest: Any, **more: Any) -> Any:
        seen.append(lead.item())
        return grad(lead, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(effect, "FullAttention", made)
        patch.setattr(effect, "_ways", lambda: [way])
        patch.setattr(torch.autograd, "grad", watched)
        effects(*asked)
    return seen[0]


@pytest.mark.parametrize(("most", "begin", "way"), [(64, 0, 0.0), (64, 0, 0.6), (2, 3, 0.6)])
def test_at_a_point_of_the_way_it_is_the_derivative_of_the_lead(
    monkeypatch: pytest.MonkeyPatch, most: int, begin: int, way: float
) -> None:
    model, read, reference, steps, oracles = case(3)
    monkeypatch.setattr(effect, "MOST_EFFECT_STEPS", most)
    monkeypatch.setattr(effect, "MOST_TRIPLES", 1000)
    asked = model, read, reference, steps, SPANS
    with monkeypatch.context() as patch:
        patch.setattr(effect, "_ways", lambda: [way])
        found = effects(*asked)
        assert found is not None
    assert found.step == 4
    assert list(found.effect) == sorted(found.effect, reverse=True)
    got = {(la, h, s): e for la, h, s, e in zip(found.layer, found.kv_head, found.span, found.effect, strict=True)}
    positive = 0
    for at in itertools.product(range(3), range(2), range(4)):
        nudged = [
            lead_at(monkeypatch, type("At", (Nudged,), said), way, *asked)
            for by in (-EPSILON, EPSILON)
            for said in ({"at": at, "by": by, "begin": begin, "oracles": oracles},)
        ]
        slope = (nudged[0] - nudged[1]) / (2 * EPSILON)
        positive += slope > 1e-9
        assert max(0.0, slope) == pytest.approx(got.get(at, 0.0), abs=1e-6), at
    assert positive == len(got) > 5


def test_all_effects_come_to_what_the_lead_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read, reference, steps, _ = case(4)
    asked = model, read, reference, steps, SPANS
    lost = lead_at(monkeypatch, FullAttention, 0.0, *asked) - lead_at(monkeypatch, FullAttention, 1.0, *asked)
    moved: list[np.ndarray] = []
    most = effect._most

    def watched(steps: tuple[int, ...], lead: float, array: np.ndarray) -> Effects:
        moved.append(array)
        return most(steps, lead, array)

    monkeypatch.setattr(effect, "_most", watched)
    monkeypatch.setattr(effect, "POINTS", 32)
    effects(*asked)
    assert abs(lost) > 0.5
    assert moved[0].sum() == pytest.approx(lost, rel=0.01)


def test_a_span_is_a_span_from_its_birth_on() -> None:
    model, read, reference, steps, _ = case(4)
    before = effects(model, read, reference, steps, SPANS)
    later = SpanRow(4, "page", 30, 40, 5, "")
    after = effects(model, read, reference, steps, [*SPANS, later])
    assert before is not None
    assert after is not None
    np.testing.assert_array_equal(before.span, after.span)
    np.testing.assert_array_equal(before.effect, after.effect)
    born = effects(model, read, reference, steps, [*SPANS, SpanRow(4, "page", 30, 36, 4, "")])
    assert born is not None
    assert not np.array_equal(before.effect, born.effect), "the window has lost six tokens to it"


def test_the_choice_is_between_the_most_probable_tokens_whatever_was_drawn() -> None:
    model, read, reference, steps, oracles = case(4)
    logits = torch.zeros(6, 512)
    logits[4, IDS[4]] = 2.0
    drawn = [*steps[:4], (replace(steps[4][0], ref_token=99), oracles[4])]
    asked = replace(reference, logits=logits)
    found, greedy = effects(model, read, asked, drawn, SPANS), effects(model, read, asked, steps, SPANS)
    assert found is not None
    assert greedy is not None
    assert found.lead == greedy.lead == 2.0
    np.testing.assert_array_equal(found.effect, greedy.effect)


def test_what_carries_the_answer_comes_first_however_much_others_look_elsewhere() -> None:
    model = support.loaded(lookup_model.build(((1, 0),), 4.0, 2.0))
    words = lookup_model.text(160, 60).split()
    ids = tuple(lookup_model.ID[word] for word in words)
    prompt = Prompt(PromptText("x"), ids, tuple(words), (None,) * len(ids))
    engine = Engine(model)
    full = support.run(model, prompt, "full", max_new=2, ignore_eos=True, keep_logits=True)
    reference = Reference("", tuple(full.ids), torch.stack(full.logits))
    sink = Records()
    options = {"max_new": 2, "forced": reference.ids, "ignore_eos": True, "coverage": True, "oracle": "all"}
    support.run(model, prompt, "streaming_llm", budget="30%", sink=sink, against=reference, **options)
    records = [(step.loss, step.oracle) for step in sink.steps]
    found = effects(model, engine.read(prompt), reference, records, sink.spans)
    assert found is not None
    needle = next(row.span for row in sink.spans if row.kind != "window" and row.tok_start <= 60 < row.tok_end)
    assert (found.step, found.layer[0], found.kv_head[0], found.span[0]) == (0, 1, 0, needle)
    assert found.lead > 0
    assert found.effect[1:].max(initial=0.0) < 0.01 * found.effect[0]
    assert found.effect[0] > found.lead, "without it the method's token leads"
    regretted = dict(attribute_records(records, 2, every_lost_step=False))
    elsewhere = [triple for triple in regretted if triple[:2] != (1, 0)]
    assert max(regretted[triple] for triple in elsewhere) > 0.1, "other heads regret much that changes nothing"


def test_nothing_to_say_where_nothing_was_lost_or_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read, reference, steps, oracles = case(5)
    assert effects(model, read, reference, steps[:4], SPANS) is None
    assert effects(model, read, reference, [(loss(7, 9), None)], SPANS) is None
    monkeypatch.setattr(effect, "MOST_WEIGHTS", 100)
    assert effects(model, read, reference, [(loss(7, 9), oracles[0])], SPANS) is None


def test_a_run_that_left_full_kv_has_them_in_its_trace_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lookup_model.save(tmp_path / "model", ((1, 0),), 0.4, 1.0)
    source = PromptText(lookup_model.text(160, 60), "a5")
    request = RunRequest(model=str(model), method="streaming_llm", budget="0.3", max_new=4, against=True)

    def run(**changes: Any) -> TraceReader:
        uid, *_ = carry_out(request.model_copy(update=changes), source, tmp_path, lambda *_: None, lambda: False)
        return TraceReader.open(tmp_path, uid)

    with run() as reader:
        first = reader.effects(0).iloc[0]
        assert (first["layer"], first["kv_head"]) == (1, 0)
        assert reader.meta.no_effects is None
    with run(method="full", budget=None) as reader:
        assert len(reader.effects(0)) == 0
        assert reader.meta.no_effects is None, "nothing was lost"
    with run(oracle="off") as reader:
        assert reader.meta.no_effects == UNRECORDED
    monkeypatch.setattr(effect, "MOST_WEIGHTS", 100)
    with run() as reader:
        assert len(reader.effects(0)) == 0
        assert reader.meta.no_effects == TOO_LONG
    monkeypatch.undo()
    monkeypatch.setattr(effect, "_moved", short)
    with run() as reader:
        assert reader.status == "completed"
        assert str(reader.meta.no_effects).startswith(str(shortage(MemoryError()))[:12])
    monkeypatch.setattr(effect, "_moved", no_backward)
    with run() as reader:
        assert reader.status == "completed"
        assert reader.meta.no_effects == "it failed (NotImplementedError: no derivative)"


def short(*_: Any) -> None:
    raise MemoryError


def no_backward(*_: Any) -> None:
    raise NotImplementedError("no derivative")
