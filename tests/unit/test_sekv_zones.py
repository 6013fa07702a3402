"""SeKV's zones for expanded spans, shared by a layer or by the model: which spans stay, by an oracle in float64 NumPy;
bytes, floors, what is logged, and that repeated steps read what they should."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import sekv_reference as reference
import torch
from test_sekv_method import PARAMS, SHAPE, Trial, tensor

from kvlens.budget import BudgetInfeasible
from kvlens.engine.session import Session
from kvlens.memory.zones import SharedZone
from kvlens.methods.run_inputs import StepEnd
from kvlens.methods.sekv.params import PRESETS, SeKVParameters
from kvlens.shape import KVShape
from kvlens.tiers.layout import shared_slot_bytes
from kvlens.tiers.slots import FREE, ROLE

Asked = dict[int, list[tuple[float, int, int]]]
"""layer -> (gate, KV head, span) that it asked for last and got"""
WIDE = KVShape(layers=3, q_heads=6, kv_heads=2, head_dim=8, itemsize=4)


class Rooms:
    """One room for several layers, as sec. 3.3 fills it: the largest gates that any layer asked for last."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.latest: Asked = {}

    def grants(self, layer: int) -> reference.Grant:
        def grant(gates: np.ndarray, tokens: list[int]) -> list[list[int]]:
            new = [(float(gates[g, i]), layer, g, i) for g, i in np.ndindex(*gates.shape) if gates[g, i] > -math.inf]
            old = [(x, other, g, i) for other, got in self.latest.items() if other != layer for x, g, i in got]
            room, kept = self.room, []
            for unit in sorted([*new, *old], key=lambda unit: -unit[0]):
                if tokens[unit[3]] <= room:
                    room -= tokens[unit[3]]
                    kept.append(unit)
            for other in {layer, *self.latest}:
                self.latest[other] = [(x, g, i) for x, of_layer, g, i in kept if of_layer == other]
            return [[i for _, g, i in self.latest[layer] if g == head] for head in range(len(gates))]

        return grant


def settings(params: SeKVParameters, shape: KVShape, budget: int) -> reference.Settings:
    cap = int(params.anchor_share * budget) // (shape.layers * shape.kv_heads * (shape.head_token_bytes + 9))
    sizes = (params.alpha, params.l_min, params.l_max, params.window, params.dim, params.max_rank, params.sinks)
    return reference.Settings(*sizes, params.zoom_rate, params.energy, params.form, cap, 0)


@pytest.mark.parametrize("zones", ["layer", "model"])
@pytest.mark.parametrize("seed", range(6))
def test_the_largest_gates_stay_until_the_room_is_full(seed: int, zones: str) -> None:
    """Six steps of random queries: what each layer's heads have, in which order it came, and what attention gives."""
    rng = np.random.default_rng(700 + seed)
    params = dataclasses.replace(
        PARAMS,
        zones=zones,
        zoom_rate=float(rng.choice([0.2, 0.4, 0.6])),
        form=str(rng.choice(["smaller", "factors", "raw"])),
        window=10,
        block=16,
    )
    n = int(rng.integers(80, 130))
    budget = int(rng.choice([0.6, 0.7]) * WIDE.full_kv_bytes(n + 8))
    trial = Trial(params, n, shape=WIDE, budget=budget, max_new=8, seed=seed).prefill()
    memory = trial.session.memory
    sizes, one = memory.layout.shared, settings(params, WIDE, budget)
    rooms = [Rooms(size) for size in sizes]
    assert len(rooms) == (1 if zones == "model" else WIDE.layers)
    refused = decided = 0
    decoded_k, decoded_v = [], []
    for step in range(6):
        out = trial.step(step, StepEnd(step - 1, n + step - 1, 1.0, 1.0) if step else None)
        decoded_k.append(trial.k)
        decoded_v.append(trial.v)
        for layer in range(WIDE.layers):
            keys, values = (
                np.concatenate([x[layer], np.stack([d[layer] for d in new[:-1]], 1)], 1) if step else x[layer]
                for x, new in ((trial.keys, decoded_k), (trial.values, decoded_v))
            )
            grown = dataclasses.replace(one, window=params.window + step)
            room = rooms[layer if len(rooms) > 1 else 0]
            expected = reference.decode_step(
                keys,
                values,
                trial.queries[layer][:, -128:],
                np.concatenate([trial.nats, np.ones(step)]) if step else trial.nats,
                trial.k[layer],
                trial.v[layer],
                trial.q[layer],
                grown,
                room.grants(layer),
                prefilled=n,
            )
            ids = [row.span for row in memory.spans.rows if row.kind == "entropy"]
            assert [(memory.spans.rows[i].tok_start, memory.spans.rows[i].tok_end) for i in ids] == expected.spans
            selection = trial.session.method.select(layer, tensor(trial.q[layer]))
            assert selection is not None
            asked = [[ids.index(s) for s in row.tolist() if s >= 0] for row in selection.requested]
            for head, (wanted, got) in enumerate(zip(asked, expected.order, strict=True)):
                assert [s for s in wanted if s in got] == got, "in the order of the gates of those that ask"
                assert set(wanted) == set(np.flatnonzero(expected.z.reshape(2, 3, -1)[head].any(0)).tolist())
                refused += len(set(wanted) - set(got))
                decided += len(wanted)
            np.testing.assert_allclose(out[layer].numpy(), expected.out, atol=2e-4)
    assert decided > refused > 0
    live = sum(int((slots.role != FREE).sum()) for slots in memory.shared)
    assert sum(int(zone.tables.live.sum()) for zone in memory.host.recaller.shared_zones) == live <= sum(sizes)
    assert memory.account.peak <= budget
    trial.session.close()


@pytest.mark.parametrize("zones", ["layer", "model"])
@pytest.mark.parametrize(
    "more", [{}, {"zoom": "next"}, {"segmentation": "chunks"}, {"form": "factors"}, {"coarse": False}]
)
def test_the_smallest_feasible_budget_is_smaller_and_holds(zones: str, more: dict[str, str]) -> None:
    floors = {}
    for name in ("head", zones):
        with pytest.raises(BudgetInfeasible) as refused:
            Trial(dataclasses.replace(PARAMS, zones=name, **more), 90, budget=1000, max_new=40).prefill()
        floors[name] = refused.value.smallest
    params, smallest = dataclasses.replace(PARAMS, zones=zones, **more), floors[zones]
    assert smallest < floors["head"]
    with pytest.raises(BudgetInfeasible):
        Trial(params, 90, budget=smallest - 1, max_new=40).prefill()
    trial = Trial(params, 90, budget=smallest, max_new=40).prefill()
    memory = trial.session.memory
    held = sum(x.numel() * x.element_size() for slots in memory.shared for x in slots.tensors())
    assert held == sum(memory.layout.shared) * shared_slot_bytes(SHAPE) == memory.account.by_name()["shared"]
    for step in range(40):
        trial.step(step, StepEnd(step - 1, 90 + step - 1, float(trial.rng.exponential()), 1.0) if step else None)
        assert memory.account.peak <= smallest
    assert any(row.tok_end > 90 for row in memory.spans.rows if row.kind in ("entropy", "chunk")), "blocks left"
    trial.session.close()


def test_a_span_that_gives_way_to_another_layer_is_logged_for_its_own() -> None:
    """Events of layers that have attended count from the next step on; slots and hot marks stay in step."""
    params = dataclasses.replace(PARAMS, zones="model", zoom_rate=0.5, form="raw")
    trial = Trial(params, 110, shape=WIDE, budget=int(0.62 * WIDE.full_kv_bytes(118)), max_new=8).prefill()
    memory = trial.session.memory
    hot, moments = torch.zeros_like(memory.spans.is_hot), set()
    for step in range(8):
        trial.step(step, StepEnd(step - 1, 109 + step, 1.0, 1.0) if step else None)
        rows = memory.log.take_events()
        for row in rows:
            if row.kind in ("zoom_in", "zoom_out"):
                assert hot[row.layer, row.kv_head, row.span] == (row.kind == "zoom_out")
                hot[row.layer, row.kv_head, row.span] = row.kind == "zoom_in"
        assert torch.equal(hot, memory.spans.is_hot)
        outs = [row for row in rows if row.kind == "zoom_out"]
        moments |= {row.after_attention for row in outs}
        (slots,) = memory.shared
        named = {
            (int(code) // 2, int(code) % 2, int(span))
            for code, span, role in zip(slots.owner, slots.span, slots.role, strict=True)
            if role != FREE
        }
        assert named == {tuple(unit) for unit in hot.nonzero().tolist()}
    assert moments == {True, False}
    trial.session.close()


def test_a_room_as_large_as_the_prompt_refuses_nothing_and_equals_zones_of_single_heads() -> None:
    outs = []
    for zones in ("head", "layer", "model"):
        trial = Trial(dataclasses.replace(PARAMS, zones=zones), 100, seed=4).prefill()
        outs.append(
            torch.stack(
                [trial.step(step, StepEnd(step - 1, 99 + step, 1.0, 1.0) if step else None) for step in range(3)]
            )
        )
        assert not [row for row in trial.session.memory.log.take_events() if row.kind == "refused"]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outs[0], outs[2], atol=1e-5, rtol=1e-5)


def test_a_zone_gives_the_room_to_the_layer_with_the_larger_gates() -> None:
    """Two layers of one KV head, spans 1 and 2 of four tokens, room for one and a half. By hand."""
    zone, lengths = SharedZone(range(2), 1, 3, 6), np.array([1, 4, 4])

    def ask(layer: int, wished: list[int], gates: list[float]) -> tuple[list[int], list[int], list[list[int]]]:
        plan = zone.plan(layer, np.array([wished]), np.array([[math.nan, *gates]]), lengths)
        return plan.missing[1].tolist(), plan.refused[1].tolist(), plan.departed.T.tolist()

    assert ask(1, [-1, -1], [math.nan, math.nan]) == ([], [], []), "nobody has asked yet"
    assert ask(0, [2, 1], [1.0, 3.0]) == ([2], [1], [])
    assert ask(1, [1, -1], [2.0, math.nan]) == ([], [1], []), "layer 0 has a larger gate"
    assert ask(1, [1, -1], [4.0, math.nan]) == ([1], [], [[0, 0, 2]])
    assert ask(0, [2, -1], [math.nan, 3.5]) == ([], [2], []), "of layer 1 counts what it asked for last"
    assert ask(1, [-1, -1], [math.nan, math.nan]) == ([], [], []), "what nobody asks for stays while there is room"
    assert ask(0, [2, -1], [math.nan, 0.5]) == ([2], [], [[1, 0, 1]])
    assert int(zone.tables.live.sum()) == 4


def test_presets_share_as_published() -> None:
    assert {name: SeKVParameters(**preset).zones for name, preset in PRESETS.items()} == {
        "paper": "model",
        "paper-literal": "model",
        "smollm2": "model",
        "demo": "head",
        "bound": "head",
        "no-coarse": "head",
    }
    assert SeKVParameters.fit(SHAPE, 900, 16, SHAPE.full_kv_bytes(180))["zones"] == "model"
    assert SeKVParameters().zones == "head", "what the method did before there was a choice"


def test_a_layer_whose_heads_are_whole_takes_no_part() -> None:
    """Its KV heads keep every token, so its zone has no slots; the other layers have theirs."""
    from kvlens.methods.sekv import layout as sekv_layout
    from kvlens.spans import Span

    spans = [Span(0, 4, "sink", ""), Span(4, 16, "entropy", ""), Span(16, 24, "entropy", "")]
    params = dataclasses.replace(PARAMS, zones="layer")
    plan = sekv_layout.plan(params, spans, 34, 4).with_whole([(0, 0), (0, 1), (1, 1)])
    assert plan.layout(params, SHAPE, 12).shared == (0, 12)
    full = plan.bytes(params, SHAPE, 12)
    assert plan.recall_within(params, SHAPE, full + shared_slot_bytes(SHAPE), 20) == 13
    assert plan.recall_within(params, SHAPE, full - 1, 20) is None


def test_slots_of_a_head_are_its_own() -> None:
    trial = Trial(dataclasses.replace(PARAMS, zones="model", form="raw"), 100, seed=4).prefill()
    session: Session = trial.session
    trial.step(0)
    (slots,) = session.memory.shared
    for layer in range(SHAPE.layers):
        read = slots.copy_slots(layer, range(SHAPE.kv_heads))
        for head in range(SHAPE.kv_heads):
            live = read.role[head] == ROLE["resident"]
            positions = read.position[head, live].long().numpy()
            spans = session.memory.spans.is_hot[layer, head].nonzero().flatten().tolist()
            rows = [session.memory.spans.rows[span] for span in spans]
            assert sorted(positions.tolist()) == [t for row in rows for t in range(row.tok_start, row.tok_end)]
            np.testing.assert_allclose(read.keys[head, live].numpy(), trial.keys[layer, head, positions], atol=1e-6)
            assert (read.role[head, ~live] == FREE).all()
