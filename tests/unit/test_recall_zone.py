"""The recall zones of a layer against a zone told in plain loops, that no slot is lent twice, and that the host plans
as the reference in torch does."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recall_oracle import LoopZone

from kvlens.kernels.zone_host import HostTables, HostWishes, decide_on_host
from kvlens.kernels.zone_tables import Wishes, ZoneTables
from kvlens.kernels.zone_torch import decide
from kvlens.memory.zones import Plan, RecallZone

HEADS, FIRST = 2, 100


class Held:
    """Which slots hold which cells of which span, told from plans alone. One for each KV head."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.at: list[dict[int, tuple[int, int]]] = [{} for _ in range(HEADS)]
        """slot -> (span, its token)"""

    def apply(self, plan: Plan) -> None:
        for head, freed in enumerate([] if plan.freed is None else plan.freed.tolist()):
            for slot in [FIRST + i for i, given_up in enumerate(freed) if given_up]:
                del self.at[head][slot]  # raises where nothing was
        slots = iter(plan.slots.tolist())
        for head, span, first, count in plan.missing.T.tolist():
            for token in range(first, first + count):
                slot = next(slots)
                assert FIRST <= slot < FIRST + self.size
                assert slot not in self.at[head], "a slot is lent twice"
                self.at[head][slot] = (span, token)
        assert next(slots, None) is None

    def spans(self, head: int) -> dict[int, int]:
        """Tokens of each span; they are its leading ones, once each."""
        found: dict[int, list[int]] = {}
        for span, token in self.at[head].values():
            found.setdefault(span, []).append(token)
        assert all(sorted(tokens) == list(range(len(tokens))) for tokens in found.values())
        return {span: len(tokens) for span, tokens in found.items()}


def rows(table: object, head: int) -> list[int]:
    """Spans of one KV head of a table of Plan."""
    return [span for of, span in table.T.tolist() if of == head]  # type: ignore[attr-defined]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.integers(1, 6),
    st.integers(0, 40),
    st.integers(1, 14),
    st.integers(1, 12),
    st.sampled_from(("all", "part", "equal", "never", "pages")),
    st.integers(0, 999),
)
def test_recalls_are_those_of_the_loops(most: int, size: int, spans: int, longest: int, mode: str, seed: int) -> None:
    """Over ten recalls with wishes of changing number, of some of the KV heads."""
    g = torch.Generator().manual_seed(seed)
    page = 3 if mode == "pages" else 1
    lengths = torch.randint(1, longest + 1, (spans + 1,), generator=g) if page == 1 else torch.full((spans + 1,), page)
    zone = RecallZone(HEADS, spans + 1, FIRST, size, page)
    loops, held = [LoopZone(zone.size) for _ in range(HEADS)], Held(zone.size)
    for _ in range(10):
        width = int(torch.randint(1, min(most, spans) + 1, (1,), generator=g))
        requested = torch.stack([1 + torch.randperm(spans, generator=g)[:width] for _ in range(HEADS)])
        requested[torch.rand(requested.shape, generator=g) < 0.3] = -1
        fire = torch.rand(HEADS, generator=g) < 0.8
        read = None
        if mode in ("part", "equal"):
            read = (torch.rand(HEADS, 3, spans + 1, generator=g) * (lengths + 1)).long()
        tokens = lengths.expand(HEADS, -1) if read is None else read.amax(1)
        plan = zone.plan(
            requested.numpy(),
            lengths.numpy(),
            fire.numpy(),
            None if read is None else read.amax(1).numpy(),
            reuse=mode != "never",
            equal_reuse=mode == "equal",
        )
        held.apply(plan)
        wishes = [
            [(span, int(tokens[head, span])) for span in requested[head].tolist() if span > 0 and tokens[head, span]]
            for head in range(HEADS)
        ]
        due = [head for head in range(HEADS) if fire[head]]
        there = {head: loops[head].reusable(wishes[head]) for head in due}
        cap = {"never": 0, "equal": min(there.values(), default=0)}.get(mode)
        for head in range(HEADS):
            if head not in due:
                assert all(count[head] == 0 for count in plan.counts.values())
                assert head not in (*plan.missing[0], *plan.departed[0], *plan.refused[0])
                assert plan.freed is None or not plan.freed[head].any()
                continue
            told = loops[head].plan(wishes[head], cap)
            assert [tuple(row) for of, *row in plan.missing.T.tolist() if of == head] == told.misses
            assert rows(plan.departed, head) == told.gone, "the least recently wanted goes first"
            assert rows(plan.refused, head) == told.refused
            fetched = sum(count for *_, count in told.misses)
            assert {name: count[head] for name, count in plan.counts.items()} == {
                "n_recalled": len(told.misses),
                "n_reused": len(wishes[head]) - len(told.refused) - len(told.misses),
                "recalled_tokens": fetched,
                "reused_tokens": told.reused,
                "ideal_tokens": fetched + told.reused - there[head],
            }
        for head in range(HEADS):
            assert held.spans(head) == {span: count for span, count in loops[head].held.items() if count}


def planned(zone: RecallZone, *wanted: int) -> Plan:
    lengths = np.array([1, 2, 2, 2, 1, 1, 1, 4, 2])
    return zone.plan(np.array([wanted]), lengths, np.ones(1, bool))


def test_least_recently_wanted_goes_first() -> None:
    zone = RecallZone(1, 9, 0, 4)
    planned(zone, 1, 2)
    planned(zone, 1)
    assert planned(zone, 3).departed.tolist() == [[0], [2]]


def test_stamps_grow_when_there_are_fewer_wishes_than_before() -> None:
    """What is wanted by a short list stays longer than what a longer one wanted before."""
    zone = RecallZone(1, 9, 0, 4)
    planned(zone, 4, 5, 6, -1, -1, -1)
    planned(zone, 6)
    assert planned(zone, 1).departed.tolist() == [[0], [5]]


def test_free_slots_are_taken_from_the_first_on() -> None:
    zone = RecallZone(1, 9, 10, 6)
    assert planned(zone, 7, 8).slots.tolist() == [10, 11, 12, 13, 14, 15]
    assert planned(zone, 1).slots.tolist() == [14, 15]
    assert planned(zone, 2).slots.tolist() == [10, 11]


def test_truncated_reuse_gives_up_the_tokens_of_lowest_priority() -> None:
    """The first KV head could reuse 6 tokens, the second one 3: so many stay of either."""
    zone, lengths, both = RecallZone(2, 10, 0, 6), np.array([1] * 7 + [4, 2, 3]), np.ones(2, bool)
    zone.plan(np.array([[7, 8], [9, -1]]), lengths, both)
    plan = zone.plan(np.array([[7, 8], [9, 8]]), lengths, both, equal_reuse=True)
    assert plan.missing.T.tolist() == [[0, 7, 3, 1], [0, 8, 0, 2], [1, 8, 0, 2]]
    assert plan.freed is not None
    assert plan.freed.tolist() == [[False] * 3 + [True] * 3, [False] * 6]
    assert plan.slots.tolist() == [3, 4, 5, 3, 4]
    assert plan.counts["reused_tokens"].tolist() == [3, 3]
    assert plan.counts["ideal_tokens"].tolist() == [0, 2]
    assert not plan.departed.size


def test_a_zone_without_room_refuses_everything() -> None:
    plan = planned(RecallZone(1, 9, 0, 0), 7, 8)
    assert plan.refused.tolist() == [[0, 0], [7, 8]]
    assert not plan.slots.size


@settings(max_examples=150)
@given(
    st.integers(1, 4),
    st.integers(0, 30),
    st.integers(1, 16),
    st.integers(1, 9),
    st.sampled_from(("all", "equal", "never")),
    st.integers(0, 999),
)
def test_the_host_plans_as_the_reference(
    heads: int, cells: int, spans: int, longest: int, mode: str, seed: int
) -> None:
    """Over eight plans of the same zones, in all that either says and writes. Of the tables' column 0, which belongs to
    no wish, only what it holds counts; of a cell that holds nothing, nothing."""
    g = np.random.default_rng(seed)
    host, reference = HostTables.empty(heads, spans + 1, cells), ZoneTables.empty(heads, spans + 1, cells)
    lengths = g.integers(1, longest + 1, spans + 1)
    for clock in range(8):
        width = int(g.integers(1, spans + 1))
        requested = np.stack([1 + g.permutation(spans)[:width] for _ in range(heads)])
        requested[g.random(requested.shape) < 0.3] = -1
        fire = g.random(heads) < 0.8
        clock *= spans
        reuse, equal = mode != "never", mode == "equal"
        count = np.where((requested >= 0) & fire[:, None], lengths[requested.clip(0)], 0)
        told = decide_on_host(host, HostWishes(requested, count, fire, clock, reuse, equal))
        tensors = torch.from_numpy(requested), None, torch.from_numpy(fire), torch.tensor(clock), None, reuse, equal
        plan = decide(reference, Wishes(*tensors), torch.from_numpy(lengths), 1)
        assert np.array_equal(count, plan.count.numpy())
        assert np.array_equal(told.accepted, plan.accepted.numpy())
        assert np.array_equal(told.present, plan.there.numpy())
        assert np.array_equal(told.stay, plan.stay.numpy())
        assert np.array_equal(np.stack((told.heads, told.cells)), np.stack(plan.fill.numpy().nonzero()))
        assert np.array_equal(np.zeros_like(host.live) if told.freed is None else told.freed, plan.freed.numpy())
        gone = np.zeros_like(host.held, dtype=bool)
        gone[tuple(told.departed)] = True
        assert np.array_equal(gone, plan.gone.numpy())
        assert np.array_equal(host.held, reference.held.numpy())
        assert np.array_equal(host.stamp[:, 1:], reference.stamp[:, 1:].numpy())
        assert np.array_equal(host.live, reference.live.numpy())
        for own, table in ((host.span, reference.span), (host.offset, reference.offset)):
            assert np.array_equal(own[host.live], table.numpy()[host.live])
