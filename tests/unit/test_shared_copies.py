"""Entries of the ledger that leave together: one copy where host memory lets them be one, the same bytes in any case,
times that are told once."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest
import torch
from fakestreams import COPY_NS, FakeDevice, only
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvlens.memory import cudalink
from kvlens.memory.cudalink import CudaLink
from kvlens.memory.ledger import Ledger
from kvlens.memory.link import HostLink
from kvlens.memory.move import Move, joined
from kvlens.store import queries

HEADS, DIM = 3, 4
POISON = -77.0


def rooms(layout: str, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A pool of host memory, poisoned, and where the units [2, tokens, DIM] of a span's KV heads lie in it."""
    if layout == "pages":
        pool = torch.full((4, HEADS, 2, tokens, DIM), POISON)
        return pool, list(pool[2])
    pool = torch.full((tokens + 5, HEADS, 2, 1, DIM), POISON)
    if layout == "rows":
        return pool, [pool[3 : 3 + tokens, head, :, 0].transpose(0, 1) for head in range(HEADS)]
    if layout == "uneven":
        return pool, [pool[at : at + tokens, head, :, 0].transpose(0, 1) for head, at in ((0, 3), (1, 1), (2, 4))]
    return pool, [torch.full((2, tokens, DIM), POISON) for _ in range(HEADS)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["pages", "rows", "uneven", "apart"]), st.integers(1, 33), st.booleans(), st.integers(0, 99))
def test_together_or_one_by_one_the_bytes_are_the_same(layout: str, tokens: int, strided: bool, seed: int) -> None:
    """Sources as a codec packs them, and as parts of something larger."""
    source = torch.randn(HEADS, 2, tokens + strided, DIM, generator=torch.Generator().manual_seed(seed))[:, :, :tokens]
    (pool, together), (other, single) = rooms(layout, tokens), rooms(layout, tokens)
    device = FakeDevice(seed)
    link = device.link(ledger := Ledger())
    entries = [ledger.open(0, head, 1, "d2h", "leave", source[head].nbytes, blocking=True) for head in range(HEADS)]
    (ticket,) = link.submit_together(
        [(entry, Move(to, part)) for entry, to, part in zip(entries, together, source, strict=True)]
    )
    ticket.wait()
    device.finish()
    for to, part in zip(single, source, strict=True):
        to.copy_(part)
    assert all(torch.equal(a, b) for a, b in zip(together, single, strict=True))
    assert torch.equal(pool, other), "what nobody named was written"
    assert (pool == POISON).any()


@pytest.mark.parametrize(("layout", "copies"), [("pages", 1), ("rows", 1), ("uneven", HEADS * 2 * 5), ("apart", HEADS)])
def test_one_stretch_of_host_memory_is_one_copy(layout: str, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(cudalink, "_copy", issued.extend)
    link = FakeDevice(eager=True, lazy=True).link(ledger := Ledger())
    source = torch.randn(HEADS, 2, 5, DIM)
    entries = [ledger.open(0, head, 1, "d2h", "leave", source[head].nbytes, blocking=True) for head in range(HEADS)]
    for ticket in link.submit_together(
        [(e, Move(to, part)) for e, to, part in zip(entries, rooms(layout, 5)[1], source, strict=True)]
    ):
        ticket.wait()
    assert len(issued) == copies
    assert all(target.is_contiguous() for target, _ in issued)
    assert sum(target.nbytes for target, _ in issued) == ledger.total["d2h"]


class Watched(TorchDispatchMode):
    """Notes whether both sides of every copy into a tensor that is there are contiguous: what a DMA engine can do, and
    no more."""

    def __init__(self) -> None:
        super().__init__()
        self.dma: list[bool] = []
        self.arranged = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.dma.append(all(side.is_contiguous() for side in args[:2]))
        self.arranged += func is torch.ops.aten.contiguous.default and not args[0].is_contiguous()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("direction", "copies", "arranged"), [("d2h", 1, 1), ("h2d", 2, 0)])
def test_only_the_device_puts_its_memory_in_order(direction: str, copies: int, arranged: int) -> None:
    """The host would do it at once, before what the copy has to wait for."""
    device = FakeDevice(lazy=True)
    link = device.link(ledger := Ledger())
    source, target = torch.randn(2, 8, DIM)[:, :3], torch.zeros(2, 3, DIM)
    link.submit_together([(ledger.open(0, 0, 1, direction, "leave", 96, blocking=True), Move(target, source))])
    with Watched() as seen:
        device.finish()
    assert seen.dma == [True] * copies
    assert seen.arranged == arranged
    assert torch.equal(target, source)


def test_no_two_shapes_storages_or_indices_are_joined() -> None:
    units, other = torch.zeros(3, 2, 4), torch.zeros(2, 2, 4)
    index = torch.tensor([0, 1])
    for moves in (
        [Move(units[0], other[0]), Move(units[1], torch.zeros(2, 4))],
        [Move(units[0], other[0]), Move(units[1, :1], other[1, :1])],
        [Move(units[0], other[0], index, [0, 1]), Move(units[1], other[1], index, [0, 1])],
        [Move(units[1], other[0]), Move(units[0], other[1])],
        [Move(units[i], units[2]) for i in (0, 0, 1)],
    ):
        assert joined(moves) is moves
    (move,) = joined([Move(units[2 * i], other[i]) for i in range(2)])
    assert (move.target.shape, move.source.shape, move.bytes) == ((2, 2, 4), (2, 2, 4), 64)
    assert move.target.data_ptr() == units.data_ptr()


@pytest.mark.parametrize("kind", [HostLink, CudaLink])
def test_each_entry_answers_for_its_own_bytes(kind: type) -> None:
    link = HostLink(ledger := Ledger()) if kind is HostLink else FakeDevice().link(ledger := Ledger())
    units = torch.zeros(2, 4)
    sizes = (12, 20)  # as many as are moved, in all
    jobs = [
        (ledger.open(0, i, 1, "d2h", "leave", size, blocking=True), Move(torch.zeros(4), units[i]))
        for i, size in enumerate(sizes)
    ]
    with pytest.raises(AssertionError, match="16 bytes moved, 12 in the ledger"):
        link.submit_together(jobs)
    link.close()


def test_what_cannot_be_copied_is_raised_to_who_waits() -> None:
    link = FakeDevice(eager=True).link(ledger := Ledger())
    jobs = [
        (ledger.open(0, i, 1, "d2h", "leave", 16, blocking=True), Move(torch.zeros(2, 3), torch.zeros(4)))
        for i in range(2)
    ]
    (ticket,) = link.submit_together(jobs)
    with pytest.raises(RuntimeError, match="cannot go into"):
        ticket.wait()
    link.resolve()
    assert ledger.drain() == []


def test_a_copy_of_several_entries_has_one_time_and_is_waited_for_once() -> None:
    device = FakeDevice(eager=True, lazy=True)
    link = device.link(ledger := Ledger())
    ledger.start_step(2)
    source = torch.randn(2, HEADS, 2, 5, DIM)
    tickets = []
    for layer in range(2):
        entries = [
            ledger.open(layer, head, 1, "d2h", "leave", source[layer, head].nbytes, blocking=True)
            for head in range(HEADS)
        ]
        tickets += link.submit_together(
            [(e, Move(to, part)) for e, to, part in zip(entries, rooms("rows", 5)[1], source[layer], strict=True)]
        )
    for ticket in reversed(tickets):
        ticket.wait()
    assert len([name for name in device.done if name == only(device.streams.d2h).name]) == 2
    link.resolve()
    rows = ledger.drain()
    assert [row.end_us - row.start_us for row in rows] == [COPY_NS // 1000] * 2 * HEADS
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
    assert (told["bytes"], told["n"], told["moving_us"]) == (source.nbytes, 2 * HEADS, 2 * COPY_NS // 1000)
