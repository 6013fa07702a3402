"""Full attention by span, coverage and mean span keys against plain float64 NumPy, on random small cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.instruments import Oracle
from kvlens.recording.fullattention import FullAttention
from kvlens.recording.layerparts import KeyParts, take_layers
from kvlens.recording.oracle import OracleTables, Owners, coverage
from kvlens.recording.snapshot import Attended, Snapshot
from kvlens.rows import SpanRow
from kvlens.tiers.slots import FREE, ROLE

LAYERS, KV_HEADS, GROUP, HEAD, SPANS, SLOTS, SCALING = 3, 2, 2, 4, 7, 9, 0.4
Q_HEADS = KV_HEADS * GROUP
EXACT = [ROLE[name] for name in ("sink", "anchor", "window", "resident")]
"""roles whose tokens are attended as they were: not rebuilt, not in few bits, no summary"""


def case(seed: int, sampled: list[tuple[int, ...]], prompt: int) -> tuple[list[Snapshot], torch.Tensor, list[Attended]]:
    """Consecutive steps that see one position more each, spans that grow in between, and slots of which some hide from
    query heads."""
    generator = torch.Generator().manual_seed(seed)
    steps = len(sampled)
    keys = torch.randn(LAYERS, KV_HEADS, prompt + steps, HEAD, generator=generator) * 2
    cuts = torch.randperm(prompt - 1, generator=generator)[: SPANS - 2].add(1).sort().values.tolist()
    edges = [0, *cuts, prompt]
    owners = Owners(prompt + steps, torch.device("cpu"))
    rows = [SpanRow(0, "window", prompt, prompt, -1, "")]
    groups, shots = [], []
    for t, layers in enumerate(sampled):
        known = min(len(edges) - 1, 1 + t * 2)  # the rest is the window's until a later step
        rows += [SpanRow(i, "page", edges[i - 1], edges[i], t, "") for i in range(len(rows), known + 1)]
        n = prompt + t + 1
        shape = (LAYERS, KV_HEADS, SLOTS)
        role = torch.randint(0, FREE + 1, shape, generator=generator)
        position = torch.stack([torch.randperm(n, generator=generator)[:SLOTS] for _ in range(LAYERS * KV_HEADS)]).view(
            shape
        )
        position = torch.where(role == FREE, -1, position)
        hidden = torch.rand(LAYERS, KV_HEADS, GROUP, SLOTS, generator=generator) < 0.3
        bias = torch.zeros(hidden.shape).masked_fill(hidden | (role == FREE)[:, :, None], -torch.inf)
        bias[..., 0] = 0
        role[..., 0], position[..., 0] = ROLE["window"], n - 1
        span = torch.randint(0, SPANS, shape, generator=generator)
        weights = torch.randn(hidden.shape, generator=generator).add(bias).softmax(-1)
        groups.append(Attended(weights, bias == 0, role, span, position))
        q = torch.randn(LAYERS, Q_HEADS, HEAD, generator=generator)
        shots.append(
            Snapshot([], q, None, None, [], {}, {}, keys[:, :, :n], SCALING, SPANS, owners.follow(rows), layers)
        )
    mass = torch.rand(steps, LAYERS, Q_HEADS, SPANS, generator=generator)
    return shots, mass / mass.sum(-1, keepdim=True), groups


def joined(groups: list[Attended]) -> Attended:
    def stack(name: str) -> Any:
        return torch.cat([getattr(group, name) for group in groups])

    return Attended(stack("weights"), stack("visible"), stack("role"), stack("span"), stack("position"))


def tables_of(
    shots: list[Snapshot], full: torch.Tensor, mass: torch.Tensor, groups: list[Attended], top_k: int, cut: int = LAYERS
) -> tuple[list[Oracle | None], list[dict[str, np.ndarray]], list[float]]:
    """Return full attention by span, collected of the layers before `cut` and then of the others."""
    tables = OracleTables(shots, top_k)
    for start, end in ((0, cut), (cut, LAYERS)):
        if start < end:
            part = joined([take_layers(group, start, end) for group in groups])
            tables.add(full[start:end], mass[:, start:end], [part])
    return tables.join()


def whole(shots: list[Snapshot]) -> torch.Tensor:
    """Return full attention of all layers [L, H_kv, T, G, n]."""
    return FullAttention(shots).layers(0, LAYERS)


def softmax(shot: Snapshot, layer: int, head: int) -> np.ndarray:
    keys = shot.shadow[layer, head // GROUP].double().numpy()  # type: ignore[index]
    scores = keys @ shot.q[layer, head].double().numpy() * SCALING
    p = np.exp(scores - scores.max())
    return p / p.sum()


def read_at_all(group: Attended, layer: int, head: int, owner: np.ndarray) -> np.ndarray:
    """bool [n]: the query head attended the position, or the summary of its span."""
    read = np.zeros(len(owner), bool)
    kv_head = head // GROUP
    for slot in range(SLOTS):
        role = int(group.role[layer, kv_head, slot])
        if role == FREE or not group.visible[layer, kv_head, head % GROUP, slot]:  # type: ignore[index]
            continue
        if role == ROLE["coarse"]:
            read |= owner == int(group.span[layer, kv_head, slot])
        else:
            read[int(group.position[layer, kv_head, slot])] = True
    return read


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    top_k=st.integers(1, SPANS + 3),
    sampled=st.lists(st.booleans(), min_size=1, max_size=5),
    layers=st.sets(st.integers(0, LAYERS - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen))),
    prompt=st.integers(SPANS + SLOTS, 40),
    cut=st.integers(1, LAYERS),
)
def test_full_attention_by_span_equals_a_plain_computation(
    seed: int, top_k: int, sampled: list[bool], layers: tuple[int, ...], prompt: int, cut: int
) -> None:
    shots, mass, groups = case(seed, [layers if yes else () for yes in sampled], prompt)
    full = whole(shots)
    covered = coverage(full, [joined(groups)])
    oracles, columns, worst = tables_of(shots, full, mass, groups, top_k, cut)
    for t, shot in enumerate(shots):
        for layer in range(LAYERS):
            for head in range(Q_HEADS):
                p = softmax(shot, layer, head)
                np.testing.assert_allclose(full[layer, head // GROUP, t, head % GROUP, : len(p)], p, atol=1e-6)
                assert (full[layer, head // GROUP, t, head % GROUP, len(p) :] == 0).all()
                role, seen = groups[t].role[layer, head // GROUP], groups[t].visible[layer, head // GROUP, head % GROUP]  # type: ignore[index]
                exact = [
                    int(at)
                    for at, r, yes in zip(groups[t].position[layer, head // GROUP], role, seen, strict=True)
                    if int(r) in EXACT and yes
                ]
                np.testing.assert_allclose(covered[t, layer, head], p[exact].sum(), atol=1e-6)
                if not sampled[t]:
                    assert oracles[t] is None
                    assert columns[t] == {}
                    continue
                found, regret, unread = oracles[t], columns[t]["regret"], columns[t]["unread"]
                assert found is not None
                if layer not in layers:
                    assert (found.span[layer, head] == -1).all()
                    assert np.isnan(found.tail_full[layer, head])
                    assert np.isnan(regret[layer, head])
                    assert np.isnan(unread[layer, head])
                    continue
                owner = shot.owner[: len(p)].numpy()  # type: ignore[index]
                by_span = np.array([p[owner == span].sum() for span in range(SPANS)])
                own = mass[t, layer, head].double().numpy()
                np.testing.assert_allclose(regret[layer, head], np.maximum(by_span - own, 0).sum(), atol=1e-5)
                order = np.sort(by_span)[::-1][:top_k]
                listed = found.span[layer, head]
                np.testing.assert_allclose(found.full[layer, head], order, atol=1e-6)
                np.testing.assert_allclose(by_span[listed[listed >= 0]], order[listed >= 0], atol=1e-6)
                np.testing.assert_allclose(found.mass[layer, head][listed >= 0], own[listed[listed >= 0]], atol=1e-6)
                np.testing.assert_allclose(found.tail_full[layer, head], 1 - order.sum(), atol=1e-5)
                lost = p * ~read_at_all(groups[t], layer, head, owner)
                np.testing.assert_allclose(unread[layer, head], lost.sum(), atol=1e-5)
                assert found.unread is not None
                assert found.lost_pos is not None
                assert found.lost_mass is not None
                in_span = np.array([lost[owner == span].sum() for span in range(SPANS)])
                np.testing.assert_allclose(
                    found.unread[layer, head][listed >= 0], in_span[listed[listed >= 0]], atol=1e-6
                )
                at = found.lost_pos[layer, head]
                np.testing.assert_allclose(found.lost_mass[layer, head], np.sort(lost)[::-1][: len(at)], atol=1e-6)
                np.testing.assert_allclose(lost[at[at >= 0]], found.lost_mass[layer, head][at >= 0], atol=1e-6)
        assert worst[t] < 1e-5


def test_a_slot_for_a_token_still_to_be_decoded_covers_nothing() -> None:
    shots, _, groups = case(5, [(0,), (0,)], 20)
    full, group = whole(shots), joined(groups)
    free = group.role == FREE
    assert free.any()
    expected = coverage(full, [group])
    group.position[free] = full.shape[-1] + 3
    assert torch.equal(coverage(full, [group]), expected)


def test_an_owner_table_handed_out_stays_as_it_was() -> None:
    owners = Owners(6, torch.device("cpu"))
    rows = [SpanRow(0, "window", 0, 6, -1, ""), SpanRow(1, "page", 0, 2, -1, "")]
    first = owners.follow(rows)
    assert owners.follow(rows) is first
    second = owners.follow([*rows, SpanRow(2, "page", 2, 5, 0, "")])
    assert first.tolist() == [1, 1, 0, 0, 0, 0]
    assert second.tolist() == [1, 1, 2, 2, 2, 0]


def test_mass_that_gets_lost_shows_in_the_self_check() -> None:
    shots, mass, groups = case(3, [(0, 1, 2)], 30)
    full = whole(shots)
    full[1, 0, 0, 0, 5] = 0
    assert tables_of(shots, full, mass, groups, 4, cut=1)[2][0] > 1e-6


def test_a_layers_keys_are_widened_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shots, _, _ = case(5, [(0, 1)], 30)
    half = [replace(shot, shadow=shot.shadow.bfloat16()) for shot in shots if isinstance(shot.shadow, torch.Tensor)]
    wide = [replace(shot, shadow=shot.shadow.float()) for shot in half if isinstance(shot.shadow, torch.Tensor)]
    widened: list[int] = []
    plain = torch.Tensor.float

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16:
            widened.append(tensor.shape[:-2].numel())
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "float", watched)
    assert torch.equal(whole(half), whole(wide))
    assert widened == [KV_HEADS] * LAYERS


@pytest.mark.parametrize("decoded", [0, 1, 5])
def test_keys_in_parts_give_the_attention_of_keys_in_one(decoded: int) -> None:
    """In whatever number of layers they are asked for, and also where an earlier step had not written all of them."""
    shots, _, _ = case(7, [(0,), (0,)], 30)
    keys = shots[-1].shadow
    assert isinstance(keys, torch.Tensor)
    cut = keys.shape[2] - decoded
    parts = [*shots[:-1], replace(shots[-1], shadow=KeyParts(keys[:, :, :cut], keys[:, :, cut:]))]
    wanted, attention = whole(shots), FullAttention(parts)
    torch.testing.assert_close(attention.layers(0, LAYERS), wanted, atol=1e-7, rtol=1e-6)
    for layer in range(LAYERS):
        torch.testing.assert_close(attention.layers(layer, 1)[0], wanted[layer], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 40.0])
def test_entropy_of_full_attention(scale: float, below: bool) -> None:
    """Of nearly even attention, and of heads that attend one position: against float64. Below: all scores are negative,
    and positions that a step had not written must not count as larger."""
    shots, _, _ = case(9, [(0,), (0,), (0,)], 30)
    shots = [replace(shot, q=shot.q * scale) for shot in shots]
    if below:
        tensors = [shot.shadow for shot in shots if isinstance(shot.shadow, torch.Tensor)]
        pairs = zip(shots, tensors, strict=True)
        shots = [replace(shot, q=-shot.q.abs(), shadow=keys.abs() + 1) for shot, keys in pairs]
    attention = FullAttention(shots)
    for layer in range(LAYERS):
        weights, entropy = attention.layer(layer)
        for t, shot in enumerate(shots):
            for head in range(Q_HEADS):
                p = softmax(shot, layer, head)
                at = head // GROUP, t, head % GROUP
                np.testing.assert_allclose(weights[at][: len(p)], p, atol=1e-5)
                nats = -np.sum(p * np.log(np.maximum(p, np.finfo(float).tiny)))
                np.testing.assert_allclose(entropy[at], nats, atol=2e-5)
