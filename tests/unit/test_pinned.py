"""Pinned host memory in slabs: little is left over, places do not overlap, everything is given back."""

from __future__ import annotations

import pytest
import torch
from fakestreams import FakeDevice

from kvlens.memory.pinned import PinnedSlabs
from kvlens.shortage import Shortage


def test_slabs_waste_little_and_are_given_back() -> None:
    device = FakeDevice()
    slabs = PinnedSlabs(device.register, device.pinned.pop)
    size = 20_400_000  # torch's allocator would lock 33,554,432
    slabs.expect(size)
    assert slabs.held < size + 4096
    held = [slabs.take((2, 17, 300), torch.float32) for _ in range(500)]
    for i, tensor in enumerate(held):
        tensor.fill_(i)
    assert all((tensor == i).all() for i, tensor in enumerate(held)), "places overlap"
    assert slabs.held == sum(device.pinned.values()) < size + 4096
    for _ in range(3000):
        slabs.take((3, 1000), torch.bfloat16)
    taken = 500 * 40_800 + 3000 * 6000
    assert taken <= slabs.held <= taken * 33 / 32 + 3100 * 16 + (1 << 20)
    assert slabs.take((0, 4), torch.float32).shape == (0, 4)
    slabs.close()
    assert not device.pinned
    assert slabs.held == 0


def test_no_pinned_memory_left_is_one_sentence() -> None:
    device = FakeDevice(refused_after=3 << 20)
    slabs = PinnedSlabs(device.register, device.pinned.pop)
    slabs.take((1 << 19,), torch.float32)
    with pytest.raises(Shortage, match=r"2097152 are held .cudaHostRegister: out of memory.; raise the limit on locked memory .ulimit -l."):
        slabs.take((1 << 19,), torch.float32)
    slabs.close()
    assert not device.pinned
