"""The ledger, the account, and bytes that really move."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlens.budget import BudgetAccount
from kvlens.link.copies import Move
from kvlens.link.host_link import HostLink
from kvlens.link.transfers import TransferLog


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
    link = HostLink(ledger := TransferLog())
    source, target = torch.arange(12.0).view(3, 4), torch.zeros(8, 4)
    rows = np.array([6, 0, 3])
    wrong = ledger.open(0, 0, 1, "h2d", "zoom", 47, blocking=True)
    with pytest.raises(AssertionError, match="48 bytes moved, 47 in"):
        link.submit(wrong, [Move(target, source, rows)])
    right = ledger.open(0, 0, 1, "h2d", "zoom", 48, blocking=True)
    link.submit(right, [Move(target, source, rows)]).wait()
    assert torch.equal(target[rows], source)
    with pytest.raises(ValueError, match="unknown transfer"):
        ledger.open(0, 0, 1, "h2d", "magic", 1, blocking=True)
    assert [row.bytes for row in ledger.drain()] == [48], "an entry whose copy never ran is not handed out"
    link.close()


def test_what_fails_on_the_link_is_raised_to_who_waits() -> None:
    link = HostLink(ledger := TransferLog())
    entry = ledger.open(0, 0, 1, "d2h", "offload", 16, blocking=True)
    ticket = link.submit(entry, [Move(torch.zeros(3), torch.zeros(4))])
    with pytest.raises(RuntimeError):
        ticket.wait()
    link.close()


def test_lines_of_one_copy_are_rows_with_its_times_and_one_wait() -> None:
    link = HostLink(ledger := TransferLog())
    source, target = torch.arange(12.0).view(3, 4), torch.zeros(3, 4)
    entry = ledger.open([0, 0, 4], [0, 1, 1], [7, 7, 9], "h2d", "recall", [16, 8, 24], blocking=True)
    link.submit(entry, [Move(target, source)])
    link.quiet()
    ledger.stood_still(entry, -1, 5000)
    rows = ledger.drain()
    assert [(row.layer, row.kv_head, row.span, row.bytes) for row in rows] == [
        (0, 0, 7, 16),
        (0, 1, 7, 8),
        (4, 1, 9, 24),
    ]
    assert [row.wait_us for row in rows] == [0, 0, 5]
    assert len({(row.start_us, row.end_us) for row in rows}) == 1
    assert ledger.total["h2d"] == 48
    link.close()
