"""Selection recall against a slow float64 reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvlens.recording.fullattention import selection_recall
from kvlens.recording.kthlargest import DRAWN_EVERY, kth_by_partition, kth_by_sorting
from kvlens.recording.snapshot import Attended
from kvlens.tiers.slots import FREE, ROLE

LAYERS, KV_HEADS, GROUP, N, SLOTS = 2, 2, 3, 40, 30
READ = [code for name, code in ROLE.items() if name not in ("coarse", "mean")]


def drawn(generator: np.random.Generator, steps: int, biased: bool) -> Attended:
    """The attention of `steps` steps over slots of every role, free ones and summaries among them."""
    shape = steps * LAYERS, KV_HEADS
    codes = [*READ, ROLE["coarse"], FREE]
    position = np.stack([generator.permutation(N)[:SLOTS] for _ in range(math.prod(shape))]).reshape(*shape, SLOTS)
    role = generator.choice(codes, size=(*shape, SLOTS))
    position[role == ROLE["coarse"]] = -1
    bias = np.where(generator.random((*shape, GROUP, SLOTS)) < 0.4, -np.inf, 0.0)
    weights = torch.zeros(*shape, GROUP, SLOTS)
    kinds = torch.from_numpy(role).to(torch.int8), torch.zeros(*shape, SLOTS), torch.from_numpy(position)
    return Attended(weights, torch.from_numpy(bias == 0) if biased else None, *kinds)


def by_hand(mass: np.ndarray, attended: set[int]) -> float:
    """Of the len(attended) positions with most mass, the attended ones of equal mass first, the share attended."""
    order = sorted(range(len(mass)), key=lambda at: (-mass[at], at not in attended))
    return len(attended & set(order[: len(attended)])) / len(attended) if attended else math.nan


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("ties", [True, False])
def test_against_sets_of_positions(biased: bool, ties: bool) -> None:
    generator, steps = np.random.default_rng(1 + biased), 3
    mass = generator.random((LAYERS, KV_HEADS, steps, GROUP, N))
    if ties:
        mass = mass.round(1)
    mass[:, :, 0, :, -2:] = 0  # the first step had not written them
    groups = [drawn(generator, steps, biased) for _ in range(2)]
    full = np.concatenate([mass, mass[::-1]])
    found = selection_recall(torch.from_numpy(full), groups).numpy()
    assert found.shape == (steps, 2 * LAYERS, KV_HEADS * GROUP)
    seen = 0
    for place, group in enumerate(groups):
        role, position = group.role.numpy(), group.position.numpy()
        for t, layer, kv_head, member in np.ndindex(steps, LAYERS, KV_HEADS, GROUP):
            row = t * LAYERS + layer
            read = np.isin(role[row, kv_head], READ)
            if group.visible is not None:
                read &= group.visible[row, kv_head, member].numpy()
            wanted = by_hand(full[place * LAYERS + layer, kv_head, t, member], set(position[row, kv_head][read]))
            assert found[t, place * LAYERS + layer, kv_head * GROUP + member] == pytest.approx(wanted, nan_ok=True)
            seen += 0 < wanted < 1
    assert seen > 50


def test_all_tokens_one_token_and_none() -> None:
    mass = torch.tensor([0.1, 0.5, 0.4, 0.0])[None, None, None, None]
    slots = torch.full((1, 1, 4), ROLE["resident"]), torch.zeros(1, 1, 4), torch.arange(4)[None, None]

    def of(*read: int) -> float:
        visible = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
        visible[..., list(read)] = True
        return float(selection_recall(mass, [Attended(torch.zeros(1, 1, 1, 4), visible, *slots)]))

    assert of(0, 1, 2, 3) == of(1) == of(1, 2) == 1
    assert of(2) == of(0) == 0
    assert of(0, 1) == 0.5
    assert math.isnan(of())


def test_both_ways_name_the_same_token() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(4, 5, 60, generator=generator).round(decimals=1)
    k = torch.randint(1, 61, (4, 5), generator=generator)
    least, ties = kth_by_partition(values, k)
    ordered = values.sort(-1, descending=True).values
    best = torch.arange(60) < k[..., None]
    for found in ((least, ties), kth_by_sorting(values, k)):
        assert torch.equal(found[0], ordered.gather(-1, (k - 1)[..., None]))
        assert torch.equal(found[1], ((ordered == least) & best).sum(-1).int())


@pytest.mark.parametrize("shape", ["spread", "equal", "zero", "misleading"])
def test_a_long_row_is_searched_between_bounds(shape: str) -> None:
    generator = torch.Generator().manual_seed(4)
    values = torch.rand(2, 3, 2, 5000, generator=generator)
    if shape == "equal":
        values = values.round(decimals=1)
    elif shape == "zero":
        values = values.where(values > 0.98, 0.0)
    elif shape == "misleading":
        values[..., ::DRAWN_EVERY] += 1  # the sample has none of the other numbers
    ordered = values.sort(-1, descending=True).values
    for k in (1, 17, 1000, 4999, 5000):
        least, ties = kth_by_partition(values, torch.full(values.shape[:-1], k))
        assert torch.equal(least[..., 0], ordered[..., k - 1])
        assert torch.equal(ties, (ordered[..., :k] == least).sum(-1).int())
