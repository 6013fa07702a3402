"""The plan of a recall in torch operations of fixed shape equals the plan in plain loops: the same spans with as many
cells, the same moves, step by step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recall_oracle import LoopZone

from kvlens.kernels.zone_tables import Wishes, ZoneTables
from kvlens.kernels.zone_torch import decide, fit, rounds_for

MODES = ("all", "part", "equal", "never")
"""whole spans; their leading cells; leading cells with equal reuse; whole spans moved whether they are there or not"""


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
def test_same_spans_same_moves_as_the_loops(
    cells: int, spans: int, longest: int, shortest: int, mode: str, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    heads, shortest = 2, min(shortest, longest)
    lengths = torch.randint(shortest, longest + 1, (spans + 1,), generator=g)
    tables, loops = ZoneTables.empty(heads, spans + 1, cells), [LoopZone(cells) for _ in range(heads)]
    parts = mode in ("part", "equal")
    rounds = rounds_for(1 if parts else shortest, longest)
    for step in range(12):
        requested = torch.stack([1 + torch.randperm(spans, generator=g) for _ in range(heads)])
        requested[torch.rand(requested.shape, generator=g) < 0.4] = -1
        fire = torch.rand(heads, generator=g) < 0.8
        read = (torch.rand(heads, 2, spans + 1, generator=g) * (lengths + 1)).long() if parts else None
        tokens = lengths.expand(heads, -1) if read is None else read.amax(1)
        wishes = [
            [(span, int(tokens[head, span])) for span in requested[head].tolist() if span > 0 and tokens[head, span]]
            for head in range(heads)
        ]
        due = [head for head in range(heads) if fire[head]]
        least = min((loops[head].reusable(wishes[head]) for head in due), default=0)
        cap = {"never": 0, "equal": least}.get(mode)
        told = {head: loops[head].plan(wishes[head], cap) for head in due}

        asked = Wishes(requested, read, fire, torch.tensor(step), rounds, mode != "never", mode == "equal")
        found = decide(tables, asked, lengths, 1)
        check_cells(tables)
        for head in range(heads):
            held = {span: count for span, count in enumerate(tables.held[head].tolist()) if count}
            assert held == {span: count for span, count in loops[head].held.items() if count}
            missing = torch.where(found.accepted, found.count - found.stay, 0)[head]
            assert int(found.fill[head].sum()) == int(missing.sum())
            if head not in told:
                assert not found.fill[head].any()
                assert not found.gone[head].any()
                continue
            assert int(found.fill[head].sum()) == sum(count for *_, count in told[head].misses)
            assert found.gone[head].nonzero()[:, 0].tolist() == sorted(told[head].gone)
            over = (found.count[head] > 0) & ~found.accepted[head]
            assert requested[head][over].tolist() == told[head].refused


@pytest.mark.parametrize(("shortest", "longest", "rounds"), [(1, 1, 1), (8, 64, 8), (8, 8, 1), (1, 5, 5)])
def test_rounds(shortest: int, longest: int, rounds: int) -> None:
    assert rounds_for(shortest, longest) == rounds


@pytest.mark.parametrize("rounds", [rounds_for(2, 9), None])
@settings(max_examples=80, deadline=None, derandomize=True)
@given(counts=st.lists(st.integers(2, 9), min_size=1, max_size=25), room=st.integers(0, 60))
def test_fit_is_greedy_with_skipping(rounds: int | None, counts: list[int], room: int) -> None:
    """In the rounds that suffice, and in as many as it takes."""
    left, expected = room, []
    for count in counts:
        expected.append(count <= left)
        left -= count if count <= left else 0
    assert fit(torch.tensor([counts]), room, rounds)[0].tolist() == expected
