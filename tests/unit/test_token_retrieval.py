"""Token retrieval and the look ahead: choices against formulas in float64, what moves, whose queries are seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Seen, Trial
from support import ListSink, raises_code, random_llama, random_prompt, run

from kvlens.engine.ahead import LookAhead
from kvlens.engine.session import Session
from kvlens.memory.zones import TokenZone
from kvlens.methods.infinigen import InfiniGen

N, NEW, PAGE, SINKS = 93, 20, 8, 2
SET = {"page": PAGE, "window": 10, "sinks": SINKS, "tokens": 2 + 10 + 14, "partial": 0.3, "alpha": 0.8, "ahead": False}


def turn(queries: np.ndarray, width: int) -> np.ndarray:
    """Right singular vectors of a group's queries [m, D], those along which queries are longest in sum."""
    axes = np.linalg.svd(queries)[2].T
    order = np.argsort(-np.abs(queries @ axes).sum(0), kind="stable")
    return axes[:, order[:width]]


def test_infinigen_brings_the_tokens_near_the_largest_estimate() -> None:
    trial = Trial("infinigen", N, NEW, **SET, dense_layers=1)
    seen, layer, width, room = Seen(trial.session), 1, round(0.3 * SHAPE.head_dim), 14
    keys = {h: list(trial.keys[layer, h]) for h in range(SHAPE.kv_heads)}
    heads = [slice(h * SHAPE.group, (h + 1) * SHAPE.group) for h in range(SHAPE.kv_heads)]
    turns = [turn(trial.queries[layer, mine, -128:].reshape(-1, SHAPE.head_dim), width) for mine in heads]
    before: list[set[int]] = [set() for _ in heads]
    counted, pages = [], 0
    for step in range(NEW):
        q, k = trial.step(step)
        now = N + step + 1
        pages = -(-max(0, now - SINKS - 14) // PAGE)  # the window holds 10 + 8/2 tokens at most
        gone = np.arange(SINKS, SINKS + pages * PAGE)
        scores = []
        for h, mine in enumerate(heads):
            index = np.array(keys[h])[gone] @ turns[h]
            scores.append(((q[layer, mine] @ turns[h]) @ index.T).max(0) / SHAPE.head_dim**0.5)
        above = [int((score > score.max() - 0.8).sum()) for score in scores]
        count = min(max(1, sum(above) // len(above)), max(1, int(0.2 * now)), room)
        counted.append(count)
        counts = trial.session.memory.host.recaller.counts
        for h in range(SHAPE.kv_heads):
            chosen = gone[np.argsort(-scores[h], kind="stable")[:count]]
            selection = seen.selection[layer]
            assert [p for p in selection.rows[h].tolist() if p >= 0] == chosen.tolist(), (step, h)
            named = np.unique((chosen - SINKS) // PAGE) + 2
            assert selection.fine[h, 0].nonzero().flatten().tolist() == named.tolist()
            best = scores[h].reshape(pages, PAGE).max(1)
            np.testing.assert_allclose(selection.score[h, 2 : 2 + pages], best, atol=1e-4)
            expected = sorted({*range(SINKS), *chosen.tolist(), *range(SINKS + pages * PAGE, now)})
            for g in range(SHAPE.group):
                assert trial.attended(layer, h * SHAPE.group + g, seen.bias[layer]) == expected, (step, h, g)
            assert counts["recalled_tokens"][layer, h] == len(set(chosen.tolist()) - before[h])
            assert counts["reused_tokens"][layer, h] == len(set(chosen.tolist()) & before[h])
            before[h] = set(chosen.tolist())
            keys[h].append(k[layer, h])
        assert trial.attended(0, 0, seen.bias[0]) == list(range(now)), "the dense layer attends everything"
    assert pages * PAGE > N - 10, "decoded tokens left the window"
    assert len(set(counted)) > 3, "as many as are near the largest"


def test_bytes_of_single_tokens_and_what_is_told_of_their_spans() -> None:
    trial = Trial("infinigen", N, NEW, **SET, dense_layers=1)
    memory, there = trial.session.memory, [set() for _ in range(SHAPE.kv_heads)]
    for step in range(NEW):
        trial.step(step)
        moved = np.zeros((SHAPE.layers, SHAPE.kv_heads))
        for entry in memory.transfers.opened:
            if entry.direction == "h2d":
                np.add.at(moved, (entry.layers, entry.kv_heads), entry.sizes)
                units = list(zip(entry.layers.tolist(), entry.kv_heads.tolist(), entry.spans.tolist(), strict=True))
                assert len(units) == len(set(units)), "one line for a KV head and span"
        np.testing.assert_array_equal(moved, memory.host.recaller.counts["recalled_tokens"] * SHAPE.head_token_bytes)
        for event in memory.log.take_events():
            if event.kind in ("recall", "release"):
                (there[event.kv_head].add if event.kind == "recall" else there[event.kv_head].discard)(event.span)
        for head in range(SHAPE.kv_heads):
            assert set(memory.spans.is_hot[1, head].nonzero().flatten().tolist()) == there[head]


def test_a_zone_of_tokens_holds_what_was_requested_last() -> None:
    zone, heads = TokenZone(5, 4, 2), np.array([0, 1])
    plan = zone.plan(np.array([[9, 3, -1, -1], [-1, -1, -1, -1]]), heads)
    assert (plan.heads.tolist(), plan.positions.tolist(), plan.slots.tolist()) == ([0, 0], [3, 9], [5, 6])
    plan = zone.plan(np.array([[9, 1, 2, 4], [7, -1, -1, -1]]), heads)
    assert plan.freed.tolist() == [[0], [5]], "3 gives way, 9 stays"
    assert list(zip(plan.heads.tolist(), plan.positions.tolist(), plan.slots.tolist(), strict=True)) == [
        (0, 1, 5),
        (0, 2, 7),
        (0, 4, 8),
        (1, 7, 5),
    ]
    plan = zone.plan(np.array([[8, -1, -1, -1]] * 2), np.array([1]))
    assert sorted(zone.position[0].tolist()) == [1, 2, 4, 9], "only the KV heads that are due change"
    with pytest.raises(AssertionError, match=r"\b4\b"):
        zone.plan(np.arange(10).reshape(2, 5), heads)


def test_the_query_seen_ahead_is_the_one_the_next_layer_makes_of_this_layers_input() -> None:
    """Where two layers are equal and get equal inputs, the estimate is the query itself; else it is not."""
    model, asked, own = random_llama(), {}, {}
    look = Session.look_ahead

    def noted(session: Session, layer: int, q: torch.Tensor) -> None:
        asked.setdefault(layer, []).append(q.clone())
        look(session, layer, q)

    attend = Session.attend

    def attended(session: Session, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        if session.decoding:
            own.setdefault(layer, []).append(q[0, :, 0].clone())
        return attend(session, layer, q, scaling)

    layers = model.model.model.layers
    layers[2].self_attn.load_state_dict(layers[1].self_attn.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "look_ahead", noted)
        patch.setattr(Session, "attend", attended)
        run(model, random_prompt(200), "infinigen", budget="0.7", max_new=6, overrides={"dense_layers": 1})
    assert set(asked) == {1, 2}
    for estimate, before, after in zip(asked[2], own[1], own[2], strict=True):
        assert torch.equal(estimate, before), "layer 2 is layer 1 here, and was given layer 1's input"
        assert not torch.allclose(estimate, after, atol=1e-3)


def test_looking_ahead_moves_in_the_background_and_changes_nothing_else() -> None:
    model, prompt, sink = random_llama(), random_prompt(300), ListSink()
    made = run(model, prompt, "infinigen", budget="0.7", max_new=8, sink=sink, overrides={"dense_layers": 1})
    rows = [row for record in sink.steps for row in record.transfers if row.direction == "h2d"]
    assert rows
    assert {(row.cause, row.blocking) for row in rows} == {("prefetch", False)}
    assert all(check.passed for check in made.checks)
    waits = ListSink()
    run(model, prompt, "infinigen", budget="0.7", max_new=8, sink=waits, overrides={"ahead": False, "dense_layers": 1})
    rows = [row for record in waits.steps for row in record.transfers if row.direction == "h2d"]
    assert {(row.cause, row.blocking) for row in rows} == {("recall", True)}
    assert not any(module._forward_pre_hooks for module in model.model.modules()), "hooks stand for one step only"


def test_a_model_whose_attention_cannot_be_told_is_refused() -> None:
    class Bare:
        def modules(self) -> list[Any]:
            return []

    session = Trial("infinigen", N, NEW, **SET, dense_layers=1).session
    with raises_code("cannot_look_ahead", method="infinigen"):
        LookAhead(Bare(), session, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", [{"alpha": -1.0}, {"partial": 0.0}, {"most_fetched": 1.5}, {"dense_layers": -1}, {"tokens": 5}]
)
def test_bad_parameters_are_one_sentence(bad: dict[str, Any]) -> None:
    from kvlens.methods.parameters import make_parameters

    with pytest.raises(ValueError, match=r"^infinigen: [^\n]*\.$"):
        make_parameters(InfiniGen, None, bad)
