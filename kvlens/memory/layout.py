"""How a run divides the device: pure arithmetic, no torch, so that a form can ask before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from kvlens.shape import KVShape

SLOT_TABLE_BYTES = 4 + 4 + 1
"""Bytes of table per slot: position int32, span int32, role uint8."""
SPAN_TABLE_BYTES = 4 + 4 + 4 + 1
"""Bytes of table per span id: length and log length float32, start int32, and whether selections govern it; one byte
per (layer, KV head) says whether it is hot."""


@dataclass(frozen=True)
class Zones:
    """Slots per zone of one layer, the same for all its KV heads.

    kept: full-resolution tokens that stay; coarse: one entry per summarised span; recall: tokens of spans fetched from
    the cold tier; window: ring of the newest tokens; held: what a counterfactual keeps exactly, which no method asks
    for.
    """

    kept: int
    coarse: int
    recall: int
    window: int
    held: int = 0

    @property
    def slots(self) -> int:
        return self.kept + self.coarse + self.recall + self.window + self.held

    def layer_bytes(self, shape: KVShape) -> int:
        """Device bytes of one layer's slots, tables included."""
        return self.slots * shape.kv_heads * (shape.head_token_bytes + SLOT_TABLE_BYTES)

    def bytes(self, shape: KVShape) -> int:
        """Device bytes when every layer has these zones, tables included."""
        return shape.layers * self.layer_bytes(shape)


@dataclass(frozen=True)
class Layout:
    """How the device is divided for the whole run: the zones, room for spans and for payloads on their way."""

    zones: Zones | tuple[Zones, ...]
    """of all layers alike, or one per layer"""
    span_capacity: int
    staging_bytes: int = 0
    """of one staging buffer"""
    window_from: int = 0
    """first prompt position that lies in the window when decoding begins"""
    window_evicts: bool = False
    """True: the newest token overwrites the oldest when the ring is full; False: the method must make blocks leave in
    time"""
    dense: tuple[int, ...] = ()
    """layers that keep every token: what leaves the window is renamed where it lies, without a copy"""
    streamed: bool = False
    """exact spans come through two staging buffers: one fills while the other is spread into its slots (FreeKV sec.
    4.2)"""
    token_major: bool = False
    """slots lie in memory as [token, KV head, D] (NHD) instead of [KV head, token, D]"""
    cold_pages: int = 0
    """pages for which the cold tier reserves one pool (n_page, n_kv, 2, p, d) per layer; 0: every span has memory of
    its own"""
    cold_page_tokens: int = 0
    recall_spans: tuple[int, int] | None = None
    """fewest and most tokens of a span that may be wished for, those of decoded tokens included; None: any. Only
    kvlens/static asks"""

    def of(self, layer: int) -> Zones:
        return self.zones[layer] if isinstance(self.zones, tuple) else self.zones

    def groups(self, layers: int) -> Iterator[tuple[range, Zones, bool]]:
        """Runs of consecutive layers that are laid out alike: (layers, zones, dense)."""
        for (zones, dense), run in groupby(range(layers), key=lambda layer: (self.of(layer), layer in self.dense)):
            members = list(run)
            yield range(members[0], members[-1] + 1), zones, dense

    @property
    def staging_buffers(self) -> int:
        return 2 if self.streamed else 1

    def bytes(self, shape: KVShape) -> int:
        """Device bytes the memory takes for this layout; a method's own index tensors come on top."""
        slots = sum(self.of(layer).layer_bytes(shape) for layer in range(shape.layers))
        tables = self.span_capacity * (SPAN_TABLE_BYTES + shape.layers * shape.kv_heads)
        return slots + self.staging_bytes * self.staging_buffers + tables
