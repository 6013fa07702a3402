"""FreeKV's streamed recall: pages come through two buffers in turn, and a copy into the buffer in use would show."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from fakestreams import FakeDevice
from methodtrial import Trial

from kvlens.link.copies import Move
from kvlens.link.host_link import Buffer, Part
from kvlens.link.transfers import TransferLog
from kvlens.memory.arrivals import RecallBatch

N, NEW = 80, 6
STEPS = 4


def freekv(monkeypatch: pytest.MonkeyPatch) -> tuple[Trial, list[list[int]]]:
    """FreeKV on random tensors, and the buffer of each page that a step moved, copy by copy as a device moves them."""
    batches: list[list[int]] = []
    whole = RecallBatch.whole

    def watched(batch: RecallBatch) -> Any:
        batches.append([id(part.buffer) for part in batch.parts()])
        return whole(batch)

    monkeypatch.setattr(RecallBatch, "whole", watched)
    trial = Trial("freekv", N, NEW, page=4, tokens=16, sinks=4, window=8, dense_layers=0)
    for step in range(STEPS):
        trial.step(step)
    return trial, batches


def test_pages_pass_through_two_buffers_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, batches = freekv(monkeypatch)
    buffers = trial.session.memory.host.arrivals.buffers
    assert len({buffer.tensor.data_ptr() for buffer in buffers}) == 2
    moved = [buffer for batch in batches for buffer in batch]
    assert len(moved) > 4
    assert set(moved) == {id(buffer) for buffer in buffers}
    assert all(left != right for left, right in pairwise(moved))


class OnePage:
    """A batch of one copy."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def parts(self) -> Iterator[Part]:
        """Yield the copy."""
        yield self._part

    def whole(self) -> Any:
        """Copy all at once: a device does not."""
        raise NotImplementedError


def spread_values(buffers: int, broken: frozenset[tuple[str, str]], seed: int) -> list[float]:
    """What is spread of four copies through so many buffers, one value each, on a device with streams."""
    device = FakeDevice(seed, broken=broken)
    ledger = TransferLog()
    link = device.link(ledger)
    own, values, tickets = [Buffer(torch.zeros(8)) for _ in range(buffers)], [], []
    for number in range(4):
        source, buffer = torch.full((8,), float(number)), own[number % buffers]
        ledger.start_step(0)
        entry = ledger.open(0, 0, 1, "h2d", "recall", source.nbytes, blocking=True)

        def spread(buffer: Buffer = buffer) -> None:
            values.append(float(buffer.tensor.mean()))

        tickets.append(link.bring(entry, OnePage(Part(Move(buffer.tensor, source), spread, buffer))))
    for ticket in tickets:
        ticket.wait()
    device.finish()
    return values


@pytest.mark.parametrize("buffers", [1, 2])
def test_each_page_is_spread_before_its_buffer_is_filled_again(buffers: int) -> None:
    for seed in range(60):
        assert spread_values(buffers, frozenset(), seed) == [0.0, 1.0, 2.0, 3.0]


def test_a_copy_into_the_buffer_in_use_would_be_seen() -> None:
    deaf = frozenset({("h2d", "waits")})
    assert any(spread_values(2, deaf, seed) != [0.0, 1.0, 2.0, 3.0] for seed in range(300))
