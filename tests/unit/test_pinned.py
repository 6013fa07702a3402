"""Pinned host memory in slabs: little is left over, places do not overlap, everything is given back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakestreams import FakeDevice

from kvlens.link import host_memory
from kvlens.link.host_memory import Pageable, PinnedSlabs, pools
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
    with pytest.raises(Shortage, match=r" 2097152 .*cudaHostRegister.*\(ulimit -l\)"):
        slabs.take((1 << 19,), torch.float32)
    slabs.close()
    assert not device.pinned


def mapped(address: int) -> bool:
    """Whether the process has memory there."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


def test_memory_is_given_back_while_it_is_memory() -> None:
    """Its addresses could be somebody else's otherwise."""
    given_back: list[bool] = []
    slabs = PinnedSlabs(lambda address, size: None, lambda address: given_back.append(mapped(address)))
    slabs.expect(5 << 20)
    slabs.take((7 << 20,), torch.uint8)
    slabs.close()
    assert given_back == [True, True]


def test_pools_of_all_layers_are_one_slab_of_their_size() -> None:
    device = FakeDevice()
    slabs = PinnedSlabs(device.register, device.pinned.pop)
    made = pools(slabs, 5, (3, 333), torch.bfloat16)  # 1998 bytes each: not a multiple of the alignment
    assert len(device.pinned) == 1
    assert slabs.held == 12288 >= 5 * 1998
    for i, pool in enumerate(made):
        pool.fill_(i)
    assert [pool.unique().tolist() for pool in made] == [[i] for i in range(5)]
    assert all(pool.data_ptr() % 16 == 0 for pool in made)
    assert [pool.shape for pool in pools(Pageable(), 2, (0, 4), torch.float32)] == [(0, 4)] * 2
    slabs.close()
    assert pools(slabs, 1, (4,), torch.float32)[0].shape == (4,), "memory can be taken anew"


def test_a_refused_registration_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA hands the error of a failed call to whoever asks next: PyTorch, at its next launch."""
    left: list[int] = []

    def refuse(address: int, size: int, flags: int) -> int:
        left.append(2)
        return 2

    def launch(size: int, device: torch.device) -> None:
        if left:
            raise RuntimeError(f"CUDA error {left.pop()}")

    runtime = SimpleNamespace(cudaHostRegister=refuse, cudaGetErrorString=lambda status: "out of memory")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(host_memory.torch, "ones", launch)
    with pytest.raises(Shortage, match="cudaHostRegister: out of memory"):
        host_memory.cuda_pinned(torch.device("cuda")).take((4,), torch.float32)
    assert not left
