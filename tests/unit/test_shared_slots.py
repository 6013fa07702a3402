"""Slots that KV heads share: a head's slots are found on the host as on a device."""

from __future__ import annotations

import torch

from kvlens.tiers.slots import FREE, SharedSlots


def test_both_ways_to_find_the_slots_of_kv_heads_agree() -> None:
    slots, generator = SharedSlots(120, 3, 4, torch.float32, torch.device("cpu")), torch.Generator().manual_seed(0)
    for _ in range(20):
        slots.owner.copy_(torch.randint(-1, 9, (120,), generator=generator))
        slots.role.copy_(torch.randint(0, 4, (120,), generator=generator))
        for layer in range(3):
            for heads in (range(3), range(1, 2)):
                assert all(map(torch.equal, slots._owned(layer, heads), slots._owned_on_host(layer, heads)))


def test_free_slots_are_nobodys() -> None:
    slots = SharedSlots(5, 1, 4, torch.float32, torch.device("cpu"))
    slots.owner.fill_(0)
    slots.role.fill_(FREE)
    assert slots.copy_slots(0, range(1)).keys.shape == (1, 0, 4)
