"""How a run divides the device: pure arithmetic, no torch, so that a form can ask before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.shape import KVShape

SLOT_TABLE_BYTES = 4 + 4 + 1
"""Bytes of table per slot: position int32, span int32, role uint8."""
SPAN_TABLE_BYTES = 4 + 4
"""Bytes of table per span id: length and log length float32; one byte per (layer, KV head) says whether it is hot."""


@dataclass(frozen=True)
class Zones:
    """Slots per zone, the same for every layer and KV head.

    kept: full-resolution tokens that stay; coarse: one entry per summarised span; recall: tokens of spans fetched from the cold
    tier; window: ring of the newest tokens.
    """

    kept: int
    coarse: int
    recall: int
    window: int

    @property
    def slots(self) -> int:
        return self.kept + self.coarse + self.recall + self.window

    def bytes(self, shape: KVShape) -> int:
        """Device bytes of a pool with these zones, tables included."""
        return self.slots * shape.layers * shape.kv_heads * (shape.head_token_bytes + SLOT_TABLE_BYTES)


@dataclass(frozen=True)
class Layout:
    """How the device is divided for the whole run: the zones, room for spans and for packed payloads on their way."""

    zones: Zones
    span_capacity: int
    staging_bytes: int = 0
    window_from: int = 0
    """first prompt position that lies in the window when decoding begins"""
    window_evicts: bool = False
    """True: the newest token overwrites the oldest when the ring is full; False: the method must make blocks leave in time"""

    def bytes(self, shape: KVShape) -> int:
        """Device bytes the memory takes for this layout; a method's own index tensors come on top."""
        tables = self.span_capacity * (SPAN_TABLE_BYTES + shape.layers * shape.kv_heads)
        return self.zones.bytes(shape) + self.staging_bytes + tables
