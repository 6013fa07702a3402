"""A drawn layer of slots and who reads what of it, for the slot tables' check and times."""

from __future__ import annotations

import dataclasses

import torch

from kvlens.kernels.slot_tables import SlotReads
from kvlens.memory.bias import CODES


def drawn(heads: int, group: int, slots: int, spans: int, parts: bool) -> SlotReads:
    """On the CPU. All roles; a stretch of free slots, and a KV head that has none but free ones; parts: spans are read
    in part."""
    role = torch.randint(0, max(CODES) + 1, (heads, slots), dtype=torch.uint8)
    role[:, slots // 3 : slots // 2] = CODES.free
    role[0] = CODES.free
    span, position = (torch.randint(0, size, (heads, slots), dtype=torch.int32) for size in (spans, 32))
    governed, is_hot, fine = (torch.rand(size) < 0.7 for size in ((spans,), (heads, spans), (heads, group, spans)))
    logs = torch.randint(1, 99, (spans,)).float().log()
    tokens = torch.randint(0, 32, (heads, group, spans)) if parts else None
    return SlotReads(
        role, span, position, logs, torch.zeros(spans, dtype=torch.int32), governed, is_hot, group, CODES, fine, tokens
    )


def there(reads: SlotReads, device: torch.device) -> SlotReads:
    """The same on a device."""
    fields = {field.name: getattr(reads, field.name) for field in dataclasses.fields(reads)}
    return SlotReads(**{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in fields.items()})
