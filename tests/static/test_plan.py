"""The plan on the device equals the host's recall zone: the same spans on the device with as many tokens, the same
moves, step by step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.kernels.zone_torch import ZoneTables, fit, plan, rounds_for
from kvlens.memory.recall import RecallZone

MODES = ("all", "part", "cap")
"""whole spans; their leading cells; whole spans with equal reuse"""


def empty(heads: int, spans: int, cells: int) -> ZoneTables:
    held, stamp = torch.zeros(2, heads, spans, dtype=torch.long)
    span, offset = torch.zeros(2, heads, cells, dtype=torch.long)
    return ZoneTables(held, stamp, span, offset, torch.zeros(heads, cells, dtype=torch.bool))


def check_cells(tables: ZoneTables) -> None:
    """Every held span has exactly its leading cells, once each."""
    for head, held in enumerate(tables.held.tolist()):
        cells = [
            (int(s), int(o))
            for s, o, live in zip(tables.span[head], tables.offset[head], tables.live[head], strict=True)
            if live
        ]
        assert sorted(cells) == [(span, at) for span, count in enumerate(held) for at in range(count)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 40),
    st.integers(1, 14),
    st.integers(1, 12),
    st.integers(1, 9),
    st.sampled_from(MODES),
    st.integers(0, 999),
)
def test_same_spans_same_moves_as_the_host(
    cells: int, spans: int, longest: int, shortest: int, mode: str, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    heads, shortest = 2, min(shortest, longest)
    lengths = torch.randint(shortest, longest + 1, (spans + 1,), generator=g)
    tables, zones = empty(heads, spans + 1, cells), [RecallZone(0, cells) for _ in range(heads)]
    rounds = rounds_for(1 if mode == "part" else shortest, longest)
    for step in range(12):
        requested = torch.stack([1 + torch.randperm(spans, generator=g) for _ in range(heads)])
        requested[torch.rand(requested.shape, generator=g) < 0.4] = -1
        fire = torch.rand(heads, generator=g) < 0.8
        count = torch.where(requested > 0, lengths[requested.clamp(min=0)], 0)
        if mode == "part":
            count = torch.where(
                requested > 0, (torch.rand(requested.shape, generator=g) * count).long() + 1, 0
            ).minimum(count)
        wishes = [
            [(s, c) for s, c in zip(*rows, strict=True) if s > 0]
            for rows in zip(requested.tolist(), count.tolist(), strict=True)
        ]
        due = [head for head in range(heads) if fire[head]]
        cap = min((zones[head].reusable(wishes[head]) for head in due), default=0) if mode == "cap" else None
        hosts = {head: zones[head].plan(wishes[head], cap) for head in due}

        count = count * fire[:, None]
        accepted = fit(count, cells, rounds)
        keep = None if cap is None else torch.full((1, 1), cap)
        found = plan(tables, requested, count, accepted, torch.tensor(step + 1), keep)
        check_cells(tables)
        for head in range(heads):
            held = {s: len(slots) for s, slots in zones[head]._held.items()}
            assert held == {s: c for s, c in enumerate(tables.held[head].tolist()) if c}
            if head not in hosts:
                assert found.moved[head] == 0
                assert not found.fill[head].any()
                assert not found.gone[head].any()
                continue
            host = hosts[head]
            assert int(found.moved[head]) == host.fetched == int(found.fill[head].sum())
            assert found.gone[head].nonzero()[:, 0].tolist() == sorted(host.gone)
            refused = [
                s
                for s, a, c in zip(requested[head].tolist(), accepted[head].tolist(), count[head].tolist(), strict=True)
                if c and not a
            ]
            assert refused == host.refused


@pytest.mark.parametrize(("shortest", "longest", "rounds"), [(1, 1, 1), (8, 64, 8), (8, 8, 1), (1, 5, 5)])
def test_rounds(shortest: int, longest: int, rounds: int) -> None:
    assert rounds_for(shortest, longest) == rounds


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=25), st.integers(0, 60))
def test_fit_is_greedy_with_skipping(counts: list[int], room: int) -> None:
    left, expected = room, []
    for count in counts:
        expected.append(count <= left)
        left -= count if count <= left else 0
    assert fit(torch.tensor([counts]), room, rounds_for(2, 9))[0].tolist() == expected
