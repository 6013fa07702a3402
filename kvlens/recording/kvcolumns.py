"""The columns of a step per (layer, KV head): bytes moved and resident, and the counts of recalls."""

from __future__ import annotations

import numpy as np

from kvlens.memory.memory import Memory
from kvlens.recording.selfcheck import Tally


def kv_columns(memory: Memory, tally: Tally) -> dict[str, np.ndarray]:
    """Return the columns [L, H_kv] of the step that ends; the tally counts the copies that it began."""
    size, opened = (memory.shape.layers, memory.shape.kv_heads), memory.transfers.opened
    moved = {name: np.zeros(size) for name in ("h2d", "d2h", "blocking")}
    for entry in opened:
        place = (entry.layers, entry.kv_heads)
        np.add.at(moved[entry.direction], place, entry.sizes)
        if entry.direction == "h2d" and entry.blocking:
            np.add.at(moved["blocking"], place, entry.sizes)
    tally.opened(opened)
    return {
        "h2d_bytes": moved["h2d"],
        "d2h_bytes": moved["d2h"],
        "blocking_bytes": moved["blocking"],
        "resident_bytes": _resident(memory),
        **memory.recaller.counts,
    }


def _resident(memory: Memory) -> np.ndarray:
    """Return the bytes per (layer, KV head): its slots with their tables; what all share (span tables, a method's index
    tensors) in equal parts, rounded down."""
    shape, slots = memory.shape, np.zeros((memory.shape.layers, memory.shape.kv_heads))
    for layer in range(shape.layers):
        for heads, zones in memory.layout.parts(layer, shape.kv_heads):
            slots[layer, heads.start : heads.stop] = zones.head_bytes(shape)
    shared = memory.account.resident - int(slots.sum())
    return slots + max(0, shared) // slots.size
