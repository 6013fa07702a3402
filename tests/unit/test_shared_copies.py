"""Lines of the ledger that move together: one copy where host memory lets them be one, the same bytes in any case,
times that are told once."""

from __future__ import annotations

from typing import Any

import duckdb
import numpy as np
import pytest
import torch
from fakestreams import COPY_NS, FakeDevice, only
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.link import cuda_link
from kvlens.link.copies import Move, Numbers, Tokens
from kvlens.link.cuda_link import CudaLink
from kvlens.link.host_link import HostLink
from kvlens.link.transfers import TransferLog
from kvlens.store import queries

HEADS, DIM = 3, 4


def leaving(link: Any, ledger: TransferLog, layers: int, tokens: int, pool: torch.Tensor, first: int) -> Any:
    """A span of all KV heads leaves the device, into rows of one token [R, H_kv, 2, 1, D] of each layer's pool."""
    source = torch.randn(layers, HEADS, 2, tokens, DIM)
    moves = [
        Move(
            pool[layer].flatten(0, 1).flatten(1),
            source[layer].permute(2, 0, 1, 3).flatten(2).flatten(0, 1),
            np.arange(first * HEADS, (first + tokens) * HEADS),
        )
        for layer in range(layers)
    ]
    heads, size = list(range(HEADS)), 2 * tokens * DIM * 4
    at = np.repeat(np.arange(layers), HEADS)
    entry = ledger.open(at, heads * layers, 1, "d2h", "leave", size, blocking=True)
    return source, link.submit(entry, moves)


def test_a_span_is_one_copy_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(cuda_link, "_copy", issued.extend)
    link = FakeDevice(eager=True, lazy=True).link(ledger := TransferLog())
    leaving(link, ledger, 2, 5, torch.zeros(2, 9, HEADS, 2, 1, DIM), 3)[1].wait()
    assert len(issued) == 2
    assert all(side.is_contiguous() for pair in issued for side in pair), "what a DMA engine can do, and no more"
    assert sum(target.nbytes for target, _ in issued) == ledger.total["d2h"]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 33), st.integers(0, 5), st.integers(0, 99))
def test_every_number_goes_into_its_row_and_into_no_other(tokens: int, first: int, seed: int) -> None:
    pool = torch.full((2, tokens + 6, HEADS, 2, 1, DIM), -77.0)
    device = FakeDevice(seed)
    link = device.link(ledger := TransferLog())
    source, ticket = leaving(link, ledger, 2, tokens, pool, first)
    ticket.wait()
    device.finish()
    assert torch.equal(pool[:, first : first + tokens, :, :, 0], source.permute(0, 3, 1, 2, 4))
    assert (pool == -77).sum() == pool.numel() - source.numel()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 19)), unique=True, min_size=1), st.booleans(), st.data())
def test_tokens_go_into_their_slots_at_once_or_in_pieces(
    where: list[tuple[int, int]], token_major: bool, data: st.DataObject
) -> None:
    """Out of rows of a page of three tokens, into slots of either order of memory."""
    rows = np.array([6 * data.draw(st.integers(0, 9)) + data.draw(st.integers(0, 2)) for _ in where])
    heads, slots = np.array(where).T
    pool = torch.arange(60.0 * DIM).view(60, DIM) + 1
    made = []
    for pieces in (False, True):
        size = (20, HEADS, DIM) if token_major else (HEADS, 20, DIM)
        keys, values = (torch.zeros(size).transpose(0, 1) if token_major else torch.zeros(size) for _ in range(2))
        move = Tokens(keys, values, pool, rows, 3, heads, slots)
        assert move.bytes == 2 * len(where) * DIM * 4
        if pieces:
            for target, source in move.pieces():
                assert target.is_contiguous()
                assert source.is_contiguous()
                target.copy_(source)
        else:
            move.run()
        made.append((keys, values))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert torch.equal(made[0][0][heads, slots], pool[rows])
    assert torch.equal(made[0][1][heads, slots], pool[rows + 3])
    assert int((made[0][0] != 0).any(-1).sum()) == len(where)


def test_stretches_of_a_flat_pool_come_one_after_the_other() -> None:
    pool, found = torch.arange(20.0), torch.zeros(6)
    move = Numbers(found, pool, np.array([7, 1, 15]), np.array([2, 1, 3]))
    move.run()
    assert found.tolist() == [7, 8, 1, 15, 16, 17]
    assert move.bytes == 24


@pytest.mark.parametrize("kind", [HostLink, CudaLink])
def test_an_entry_answers_for_the_bytes_of_all_its_lines(kind: type) -> None:
    link = HostLink(ledger := TransferLog()) if kind is HostLink else FakeDevice().link(ledger := TransferLog())
    units = torch.zeros(2, 4)
    entry = ledger.open(0, [0, 1], 1, "d2h", "leave", [12, 16], blocking=True)
    with pytest.raises(AssertionError, match="32 bytes moved, 28 in the transfer log"):
        link.submit(entry, [Move(torch.zeros(4), unit) for unit in units])
    link.close()


def test_what_cannot_be_copied_is_raised_to_who_waits() -> None:
    link = FakeDevice(eager=True).link(ledger := TransferLog())
    entry = ledger.open(0, [0, 1], 1, "d2h", "leave", 16, blocking=True)
    ticket = link.submit(entry, [Move(torch.zeros(2, 3), torch.zeros(4)) for _ in range(2)])
    with pytest.raises(RuntimeError, match="cannot go into"):
        ticket.wait()
    link.resolve()
    assert ledger.drain() == []


def test_a_copy_of_several_lines_has_one_time_and_is_waited_for_once() -> None:
    device = FakeDevice(eager=True, lazy=True)
    link = device.link(ledger := TransferLog())
    ledger.start_step(2)
    source, ticket = leaving(link, ledger, 2, 5, torch.zeros(2, 9, HEADS, 2, 1, DIM), 3)
    ticket.wait()
    assert len([name for name in device.done if name == only(device.streams.d2h).name]) == 2
    link.resolve()
    rows = ledger.drain()
    assert [row.end_us - row.start_us for row in rows] == [2 * COPY_NS // 1000] * 2 * HEADS
    assert [row.wait_us for row in rows] == [0] * (2 * HEADS - 1) + [2 * COPY_NS // 1000]

    store = duckdb.connect()
    store.execute("ATTACH ':memory:' AS run")
    store.execute(
        "CREATE TABLE run.main.transfer (step INT, direction VARCHAR, cause VARCHAR, bytes UBIGINT, start_us BIGINT, "
        "end_us BIGINT, wait_us BIGINT, blocking BOOLEAN)"
    )
    for row in rows:
        store.execute(
            "INSERT INTO run.main.transfer VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [row.step, row.direction, row.cause, row.bytes, row.start_us, row.end_us, row.wait_us, row.blocking],
        )
    (told,) = store.execute(queries.TRANSFER_TIMES).df().to_dict("records")
    assert (told["bytes"], told["n"], told["moving_us"]) == (source.nbytes, 1, 2 * COPY_NS // 1000)
