"""The recall zone's bookkeeping, the ledger, the account, and bytes that really move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlens.memory.account import BudgetAccount
from kvlens.memory.ledger import Ledger
from kvlens.memory.link import HostLink, Move
from kvlens.memory.recall import RecallZone

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 30), st.lists(st.lists(st.integers(0, 11), unique=True, max_size=8), max_size=8))
def test_recall_zone_never_lends_a_slot_twice(lengths: list[int], size: int, wanted: list[list[int]]) -> None:
    def tokens(span: int) -> int:
        return lengths[span % len(lengths)]

    zone, held = RecallZone(100, size), {}
    for wish in wanted:
        plan = zone.plan(wish, tokens)
        assert set(plan.hits) <= set(held)
        for span, slots in plan.evicted:
            assert held.pop(span) == slots
            assert span not in wish or span in plan.refused
        for span, slots in plan.misses:
            assert len(slots) == tokens(span)
            held[span] = slots
        slots = [slot for group in held.values() for slot in group]
        assert len(slots) == len(set(slots)) <= size
        assert all(100 <= slot < 100 + size for slot in slots)
        assert {span for span in wish if zone.holds(span)} >= set(wish) - set(plan.refused)
        # greedy: what was refused did not fit beside the accepted ones of higher priority
        room = size
        for span in wish:
            if span in plan.refused:
                assert tokens(span) > room
            else:
                room -= tokens(span)


def test_least_recently_wanted_goes_first() -> None:
    zone = RecallZone(0, 4)
    zone.plan([1, 2], lambda _: 2)
    zone.plan([1], lambda _: 2)
    plan = zone.plan([3], lambda _: 2)
    assert [span for span, _ in plan.evicted] == [2]


def test_account_counts_storage_once_and_refuses_to_pass_its_limit() -> None:
    account = BudgetAccount()
    block = torch.zeros(100, dtype=torch.float32)
    account.hold("a", block[:10], block[50:])
    assert account.resident == 400, "views share one storage, and it counts whole"
    account.hold("b", block)
    assert account.resident == 400
    account.release("a")
    assert account.resident == 400
    account.start_step()
    account.hold("c", torch.zeros(50, dtype=torch.int8))
    account.release("c")
    assert (account.resident, account.peak) == (400, 450)
    account.limit = 420
    with pytest.raises(AssertionError, match="the budget is 420"):
        account.hold("d", torch.zeros(50, dtype=torch.int8))


def test_the_ledger_cannot_lie() -> None:
    ledger, link = Ledger(), HostLink()
    source, target = torch.arange(12.0).view(3, 4), torch.zeros(8, 4)
    index = torch.tensor([6, 0, 3])
    wrong = ledger.open(0, 0, 1, "h2d", "zoom", 47, blocking=True)
    with pytest.raises(AssertionError, match="48 bytes moved, 47 in the ledger"):
        link.submit(wrong, [Move(target, source, index)])
    right = ledger.open(0, 0, 1, "h2d", "zoom", 48, blocking=True)
    link.submit(right, [Move(target, source, index)]).wait()
    assert torch.equal(target[index], source)
    with pytest.raises(ValueError, match="unknown transfer"):
        ledger.open(0, 0, 1, "h2d", "magic", 1, blocking=True)
    assert [row.bytes for row in ledger.drain()] == [48], "an entry whose copy never ran is not handed out"
    link.close()


def test_what_fails_on_the_link_is_raised_to_who_waits() -> None:
    ledger, link = Ledger(), HostLink()
    entry = ledger.open(0, 0, 1, "d2h", "offload", 16, blocking=True)
    ticket = link.submit(entry, [Move(torch.zeros(3), torch.zeros(4))])
    with pytest.raises(RuntimeError):
        ticket.wait()
    link.close()
