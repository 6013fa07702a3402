"""The CUDA link over streams that a drawn schedule runs: every read sees the bytes of its copy, and nothing else
(tests/fakestreams.py)."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from fakestreams import COPY_NS, FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.link.copies import Move, Streams
from kvlens.link.cuda_link import CudaLink
from kvlens.link.host_link import Buffer, HostLink, Link, Part
from kvlens.link.host_memory import PinnedSlabs
from kvlens.link.transfers import Entry, TransferLog

SLOTS, DIM, LONGEST = 24, 4, 6


class Staged:
    """A batch of one unit through a staging buffer, or through one that waits for nobody."""

    def __init__(self, move: Move, spread: Callable[[], object], buffer: Buffer | None = None) -> None:
        self._part = Part(move, spread, buffer)  # type: ignore[arg-type]

    def whole(self) -> tuple[list[Move], Callable[[], None] | None]:
        return [self._part.move], self._part.spread  # type: ignore[list-item]

    def parts(self) -> Iterator[Part]:
        yield self._part


class Pool:
    """Slots on a fake device, used as the memory uses them, and what every read must see."""

    def __init__(self, device: FakeDevice, seed: int) -> None:
        self.device, self.random = device, random.Random(seed)
        self.ledger = TransferLog()
        self.link = device.link(self.ledger)
        self.slots = torch.zeros(SLOTS, DIM)
        self.expected = torch.zeros(SLOTS, DIM)
        """what the slots hold once everything issued so far is done"""
        self.buffers = [Buffer(torch.zeros(LONGEST * DIM)) for _ in range(2)]
        self.turn = self.number = 0
        self.cold: list[tuple[torch.Tensor, torch.Tensor]] = []
        """units, and what they hold once their copies are done"""
        self.reads: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        self.under_way: list[tuple[list[int], object]] = []

    def compute(self, work: Callable[[], None]) -> None:
        self.device.compute.run(work)

    def some(self) -> list[int]:
        """Slots that no copy under way writes; in any order, often consecutive."""
        taken = {slot for slots, _ in self.under_way for slot in slots}
        free = [slot for slot in range(SLOTS) if slot not in taken]
        count = min(len(free), self.random.randint(1, LONGEST))
        if self.random.random() < 0.5:
            first = self.random.randint(0, len(free) - count)
            return free[first : first + count]
        return self.random.sample(free, count)

    def write(self) -> None:
        """The model computes new contents."""
        slots = self.some()
        self.number += 1
        fresh = torch.full((len(slots), DIM), float(self.number))
        self.expected[slots] = fresh
        self.compute(lambda: self.slots.__setitem__(slots, fresh))

    def read(self) -> None:
        """The model attends."""
        slots = self.some()
        seen: list[torch.Tensor] = []
        self.reads.append((seen, self.expected[slots].clone()))
        self.compute(lambda: seen.append(self.slots[slots].clone()))

    def offload(self) -> None:
        """As a block leaves the window: read into a tensor of its own, copied (one KV head, or two in one copy), waited
        for, given up."""
        slots = self.some()
        if not slots:
            return
        heads = self.random.choice((1, 2))
        leaving = torch.empty(heads, len(slots), DIM // heads)
        self.compute(lambda: leaving.copy_(self.slots[slots].unflatten(1, (heads, -1)).transpose(0, 1)))
        unit = self.link.host.take((len(slots), DIM), leaving.dtype)
        self.cold.append((unit, self.expected[slots].clone()))
        rows = unit.unflatten(1, (heads, -1))
        sizes = [leaving[head].nbytes for head in range(heads)]
        entry = self.ledger.open(0, list(range(heads)), 1, "d2h", "leave", sizes, blocking=True)
        self.link.submit(entry, [Move(rows[:, head], leaving[head]) for head in range(heads)]).wait()
        self.number += 1
        self.compute(lambda value=float(self.number): leaving.fill_(-value))  # its memory is another's now

    def recall(self) -> None:
        """A unit comes back, straight into slots or through a staging buffer; who attends them waits first."""
        if not self.cold:
            return
        unit, holds = self.random.choice(self.cold)
        count = self.random.randint(1, len(unit))
        slots = self.some()[:count]
        count = len(slots)
        if not count:
            return
        index, rows, source = torch.tensor(slots), np.array(slots), unit[:count]
        entry = self.ledger.open(0, 0, 1, "h2d", "recall", source.nbytes, blocking=False)
        if self.random.random() < 0.5:
            ticket = self.link.submit(entry, [Move(self.slots, source, rows)])
        else:
            buffer = self.buffers[self.turn % 2]
            self.turn += 1
            staged = buffer.tensor[: source.numel()].view(source.shape)
            ticket = self.link.bring(
                entry, Staged(Move(staged, source), lambda: self.slots.index_copy_(0, index, staged), buffer)
            )
        self.under_way.append((slots, ticket))
        self.expected[slots] = holds[:count]

    def land(self) -> None:
        """The oldest copies under way are waited for, in the order in which the memory waits: the newest first."""
        count = self.random.randint(0, len(self.under_way))
        for _, ticket in reversed(self.under_way[:count]):
            ticket.wait()  # type: ignore[attr-defined]
        del self.under_way[:count]

    def go(self, turns: int) -> None:
        steps = (self.write, self.write, self.read, self.offload, self.recall, self.recall, self.recall, self.land)
        for step in range(turns):
            self.ledger.start_step(step)
            self.random.choice(steps)()
            if step % 7 == 6:
                self.link.resolve(step - 5)
        self.device.finish()

    def wrong(self) -> int:
        """Reads that saw other bytes than those of their copies, and units that hold others."""
        seen_wrong = sum(not torch.equal(seen[0], expected) for seen, expected in self.reads)
        return seen_wrong + sum(not torch.equal(unit, holds) for unit, holds in self.cold)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_every_read_sees_the_bytes_of_its_copy(seed: int, lazy: bool) -> None:
    pool = Pool(FakeDevice(seed, lazy=lazy), seed)
    pool.go(60)
    assert pool.wrong() == 0
    pool.link.resolve()
    rows = pool.ledger.drain()
    assert sum(row.bytes for row in rows) == sum(pool.ledger.total.values())
    assert all(row.end_us > row.start_us >= 0 for row in rows)


@pytest.mark.parametrize("deaf", ["compute", "h2d", "d2h", "spread"])
def test_a_schedule_finds_out_each_stream_that_does_not_wait(deaf: str) -> None:
    """The test above can fail: without the marks that one stream waits for, some schedule reads wrong bytes."""
    broken = frozenset({(deaf, "waits")})
    for seed in range(300):
        pool = Pool(FakeDevice(seed, broken=broken), seed)
        pool.go(60)
        if pool.wrong():
            return
    raise AssertionError(f"nothing noticed that stream {deaf} waits for nobody")


def entry(ledger: TransferLog, source: torch.Tensor, direction: str = "h2d", step: int = 0) -> Entry:
    ledger.start_step(step)
    return ledger.open(0, 0, 1, direction, "recall", source.nbytes, blocking=True)


def test_two_buffers_overlap_and_one_does_not() -> None:
    """Order of work on a device whose streams run as soon as they can: with two buffers a copy is done before the last
    was spread."""

    def order(buffers: int) -> list[str]:
        found: set[tuple[str, ...]] = set()
        for seed in range(60):
            device = FakeDevice(seed, eager=True)
            link = device.link(ledger := TransferLog())
            own = [Buffer(torch.zeros(8)) for _ in range(buffers)]
            tickets = []
            for i in range(4):
                source = torch.full((8,), float(i))
                buffer = own[i % buffers]

                def spread(buffer: Buffer = buffer, value: float = float(i)) -> None:
                    assert (buffer.tensor == value).all()

                tickets.append(link.bring(entry(ledger, source), Staged(Move(buffer.tensor, source), spread, buffer)))
            for ticket in tickets:
                ticket.wait()
            device.finish()
            found.add(tuple(device.done))
        return [" ".join(one) for one in found]

    one, two = order(1), order(2)
    assert one == ["h2d spread h2d spread h2d spread h2d spread"]
    assert any("h2d h2d" in done for done in two)
    assert not any("h2d h2d h2d" in done for done in two), "a third copy would have overwritten the first one's buffer"


def test_the_host_never_waits_in_a_step_and_times_come_from_the_marks() -> None:
    device = FakeDevice(lazy=True)
    link = device.link(ledger := TransferLog())
    source, target = torch.ones(3, 4), torch.zeros(8, 4)
    device.now = 5_000
    ticket = link.submit(entry(ledger, source, step=3), [Move(target, source, np.array([1, 2, 5]))])
    ticket.wait()
    later = link.submit(entry(ledger, source, step=4), [Move(target, source, np.array([6, 7, 0]))])
    assert not device.done
    assert link.host_wait_ns == 0
    assert ledger.drain() == [], "a copy that is not known to be done has no times yet"
    link.resolve(3)
    assert torch.equal(target.sum(1), torch.tensor([0.0, 4, 4, 0, 0, 4, 0, 0]))
    assert link.host_wait_ns > 0, "the host waited, and says so apart"
    (row,) = ledger.drain(3)
    assert row.end_us - row.start_us == COPY_NS // 1000
    assert row.wait_us == ledger.waited_ns(3) // 1000 == COPY_NS // 1000
    later.wait()
    link.resolve()
    assert [row.step for row in ledger.drain()] == [4]
    assert ledger.waited_ns(4) == COPY_NS


def test_who_waits_for_the_last_copy_has_waited_for_those_before() -> None:
    device = FakeDevice(lazy=True, eager=True)
    link = device.link(ledger := TransferLog())
    source, target = torch.ones(1, 4), torch.zeros(8, 4)
    tickets = [link.submit(entry(ledger, source), [Move(target, source, np.array([i]))]) for i in range(5)]
    for ticket in reversed(tickets):
        ticket.wait()
    link.resolve()
    assert [row.wait_us for row in ledger.drain()] == [0, 0, 0, 0, 5 * COPY_NS // 1000]


def test_times_keep_their_resolution_far_from_the_beginning() -> None:
    device = FakeDevice()
    link = device.link(ledger := TransferLog())
    source, target = torch.ones(4), torch.zeros(4)
    starts = []
    for step in range(4):
        device.now += 15_000_000_000
        link.submit(entry(ledger, source, step=step), [Move(target, source)]).wait()
        link.resolve()
        starts.append(ledger.drain()[0].start_us)
        device.finish()
        assert device.now - link._base.at < 15_000_000_000, "times are counted from an event that is near"  # type: ignore[attr-defined]
    assert [b - a for a, b in pairwise(starts)] == [15_000_000 + COPY_NS // 1000] * 3


class Forgetful:
    """A device that does work at once and holds nothing, as CUDA holds no Python object; its marks are reached when
    told."""

    def __init__(self) -> None:
        self.ended = False

    def mark(self, timed: bool = False) -> Forgetful:
        return self

    def reached(self) -> bool:
        return self.ended

    def wait(self, mark: object) -> None:
        pass

    def run(self, work: Callable[[], None]) -> None:
        work()

    def synchronize(self) -> None:
        pass


def forgetful(device: Forgetful) -> Callable[[TransferLog], CudaLink]:
    streams = Streams(device, device, device, device)  # type: ignore[arg-type]
    return lambda ledger: CudaLink(ledger, streams, PinnedSlabs(lambda *_: None, lambda _: None))


@pytest.mark.parametrize("make", [HostLink, forgetful(Forgetful())], ids=["host", "streams"])
@pytest.mark.parametrize("staged", [True, False])
def test_what_cannot_be_unpacked_is_raised_to_who_waits(make: Callable[[TransferLog], Link], staged: bool) -> None:
    link = make(ledger := TransferLog())
    source, buffer = torch.ones(4), Buffer(torch.zeros(4))

    def fails() -> None:
        raise ValueError("cannot be unpacked")

    batch = Staged(Move(buffer.tensor, source), fails, buffer if staged else None)
    ticket = link.bring(entry(ledger, source), batch)
    with pytest.raises(ValueError, match="cannot be unpacked"):
        ticket.wait()
    link.submit(entry(ledger, source), [Move(buffer.tensor, source)]).wait()
    link.close()


@pytest.mark.parametrize("heads", [0, 2])
def test_what_a_copy_reads_is_held_until_the_copy_has_ended(heads: int) -> None:
    """Of one entry, and of the heads of a span in one copy, whose tensors nobody but the copy knows."""
    device = Forgetful()
    link = forgetful(device)(ledger := TransferLog())
    memory = np.ones(4, dtype=np.float32)
    source, held = torch.from_numpy(memory), weakref.ref(memory)
    if heads:
        target = torch.zeros(2, heads)
        moves = [Move(target[:, i], part) for i, part in enumerate(source.view(heads, -1))]
        ticket = link.submit(entry(ledger, source, "d2h"), moves)
        del moves
    else:
        ticket = link.submit(entry(ledger, source, "d2h"), [Move(torch.zeros(4), source)])
    del source, memory
    ticket.wait()
    gc.collect()
    assert held() is not None, "the model's stream only knows that it has to wait"
    device.ended = True
    link.quiet()
    gc.collect()
    assert held() is None


@pytest.mark.parametrize(
    "make", [HostLink, FakeDevice(5).link, FakeDevice(lazy=True).link], ids=["host", "drawn", "lazy"]
)
def test_links_refuse_raise_and_close_alike(make: Callable[[TransferLog], Link]) -> None:
    link = make(ledger := TransferLog())
    source, target = torch.arange(12.0).view(3, 4), torch.zeros(2, 8, 4)
    with pytest.raises(AssertionError, match="48 bytes moved, 47 in the transfer log"):
        link.submit(ledger.open(0, 0, 1, "h2d", "zoom", 47, blocking=True), [Move(target[0], source)])
    index = [6, 0, 1]
    moves = [Move(target[i], source, np.array(index)) for i in (0, 1)]
    link.submit(ledger.open(0, 0, 1, "h2d", "zoom", 96, blocking=True), moves).wait()
    link.quiet()
    assert torch.equal(target[:, index], source.expand(2, 3, 4))
    for wrong in (Move(torch.zeros(3), torch.zeros(4)), Move(target[0], torch.zeros(4, 1), np.array([0, 1, 2, 4]))):
        ticket = link.submit(ledger.open(0, 0, 1, "d2h", "offload", 16, blocking=True), [wrong])
        with pytest.raises(RuntimeError):
            ticket.wait()

    link.resolve()
    assert all(row.end_us >= row.start_us for row in ledger.drain())
    link.close()


@given(st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=12), st.booleans())
def test_pieces_are_the_same_copy(slots: list[int], token_major: bool) -> None:
    target = torch.zeros(31, 2, 3).transpose(0, 1) if token_major else torch.zeros(2, 31, 3)
    source = torch.arange(len(slots) * 3.0).view(-1, 3) + 1
    whole, by_piece = target[1].clone(), target[1]
    Move(whole, source, np.array(slots)).run()
    for to, piece in Move(by_piece, source, np.array(slots)).pieces():
        assert to.is_contiguous()
        assert piece.is_contiguous()
        to.copy_(piece)
    assert torch.equal(by_piece, whole)
    assert not target[0].any()
