"""How a run divides the device: pure arithmetic, no torch, so that a form can ask before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from kvlens.quantised.form import Quantised
from kvlens.shape import KVShape

SLOT_TABLE_BYTES = 4 + 4 + 1
"""Bytes of table per slot: position int32, span int32, role uint8."""
SPAN_TABLE_BYTES = 4 + 4 + 4 + 1
"""Bytes of table per span id: length and log length float32, start int32, and whether selections govern it; one byte
per (layer, KV head) says whether it is hot."""


OWNER_BYTES = 4
"""Bytes that a slot which several KV heads share takes more: whose it is, int32."""


@dataclass(frozen=True)
class Zones:
    """Slots per zone of a KV head.

    kept: full-resolution tokens that stay; coarse: one entry per summarised span; recall: tokens of spans fetched from
    the cold tier; window: ring of the newest tokens, or, where it is a bag, of all tokens that may still be evicted;
    held: what a counterfactual keeps exactly, which no method asks for.
    """

    kept: int
    coarse: int
    recall: int
    window: int
    held: int = 0

    @property
    def slots(self) -> int:
        return self.kept + self.coarse + self.recall + self.window + self.held

    def head_bytes(self, shape: KVShape) -> int:
        """Device bytes of one KV head's slots, tables included."""
        return self.slots * (shape.head_token_bytes + SLOT_TABLE_BYTES)

    def layer_bytes(self, shape: KVShape) -> int:
        """Device bytes of one layer's slots when all its KV heads have these zones, tables included."""
        return shape.kv_heads * self.head_bytes(shape)

    def bytes(self, shape: KVShape) -> int:
        """Device bytes when every layer has these zones, tables included."""
        return shape.layers * self.layer_bytes(shape)


def shared_slot_bytes(shape: KVShape) -> int:
    """Return the device bytes of a slot that several KV heads share, tables included."""
    return Zones(1, 0, 0, 0).head_bytes(shape) + OWNER_BYTES


@dataclass(frozen=True)
class Layout:
    """How the device is divided for the whole run: the zones, room for spans and for payloads on their way."""

    zones: Zones | tuple[Zones | tuple[Zones, ...], ...]
    """of all layers alike, or one per layer, or, where the KV heads of a layer differ, one per KV head of it"""
    span_capacity: int
    staging_bytes: int = 0
    """of one staging buffer"""
    window_from: int = 0
    """first prompt position that lies in the window when decoding begins"""
    bag: bool = False
    """True: the window is no ring: every KV head gives up the token that the method names (`Eviction`), and the newest
    one takes its slot"""
    quantised: Quantised | None = None
    """what leaves the window is packed where it stays on the device; None: it goes where the placement says"""
    weighted: bool = False
    """coarse entries say themselves how many tokens they stand for (Placement.coarse_counts)"""
    farthest: int = 0
    """in layers that are not dense, keys farther than this from the step's own token are seen as if they lay just so
    far (kvlens/memory/reads.py); 0: where they are"""
    closed: bool = False
    """in layers that are not dense, the gaps between a KV head's tokens are closed: keys are seen as if the tokens that
    are left lay side by side up to the step's own"""
    dense: tuple[int, ...] = ()
    """layers that keep every token: what leaves the window is renamed where it lies, without a copy"""
    whole: frozenset[tuple[int, int]] = frozenset()
    """(layer, KV head) that keep every token in the same way, in layers whose other KV heads need not, and attend all
    of them"""
    streamed: bool = False
    """exact spans come through two staging buffers: one fills while the other is spread into its slots (Liu et al.,
    sec. 4.2)"""
    token_major: bool = False
    """slots lie in memory as [token, KV head, D] (NHD) instead of [KV head, token, D]"""
    cold_pages: int = 0
    """pages for which the cold tier reserves one pool (n_page, n_kv, 2, p, d) per layer; 0: every span has memory of
    its own"""
    cold_page_tokens: int = 0
    shared: tuple[int, ...] = ()
    """slots of the recall zones that KV heads share: one zone for each layer, or a single one for the model; the zones
    of single KV heads then have no slots for recalled spans. (): every KV head has a zone of its own"""
    recall_spans: tuple[int, int] | None = None
    """fewest and most tokens of a span that may be wished for, those of decoded tokens included; None: any. Only
    kvlens/lab/gpu/static asks"""

    def zones_of(self, layer: int, kv_head: int = 0) -> Zones:
        zones = self.zones[layer] if isinstance(self.zones, tuple) else self.zones
        return zones[kv_head] if isinstance(zones, tuple) else zones

    def dense_at(self, layer: int, kv_head: int) -> bool:
        """Whether a KV head keeps every token."""
        return layer in self.dense or (layer, kv_head) in self.whole

    def parts(self, layer: int, kv_heads: int) -> tuple[tuple[range, Zones], ...]:
        """Runs of consecutive KV heads of a layer that have equal zones."""
        runs = groupby(range(kv_heads), key=lambda head: (self.zones_of(layer, head), self.dense_at(layer, head)))
        members = [(list(run), zones) for (zones, _), run in runs]
        return tuple((range(heads[0], heads[-1] + 1), zones) for heads, zones in members)

    def groups(self, layers: int, kv_heads: int) -> Iterator[tuple[range, range, Zones, bool]]:
        """Runs of consecutive layers that are laid out alike, part by part: (layers, KV heads, zones, dense)."""

        def kind(layer: int) -> tuple[tuple[tuple[range, Zones], bool], ...]:
            return tuple((part, self.dense_at(layer, part[0].start)) for part in self.parts(layer, kv_heads))

        for parts, run in groupby(range(layers), key=kind):
            members = list(run)
            for (heads, zones), dense in parts:
                yield range(members[0], members[-1] + 1), heads, zones, dense

    def shared_zone(self, layer: int) -> int:
        """Return which of the shared zones a layer's KV heads use."""
        return layer if len(self.shared) > 1 else 0

    def sharing(self, layers: int) -> list[range]:
        """Return the layers whose KV heads use each shared zone."""
        if len(self.shared) > 1 or layers == 1:
            return [range(layer, layer + 1) for layer in range(len(self.shared))]
        return [range(layers)] * len(self.shared)

    @property
    def staging_buffers(self) -> int:
        return 2 if self.streamed else 1

    def bytes(self, shape: KVShape) -> int:
        """Device bytes the memory takes for this layout; a method's own index tensors come on top."""
        slots = sum(
            len(heads) * (zones.head_bytes(shape) + zones.coarse * 4 * self.weighted)
            for layer in range(shape.layers)
            for heads, zones in self.parts(layer, shape.kv_heads)
        )
        tables = self.span_capacity * (SPAN_TABLE_BYTES + shape.layers * shape.kv_heads)
        slots += 0 if self.quantised is None else self.quantised.bytes(shape)
        slots += sum(self.shared) * shared_slot_bytes(shape)
        slots += shape.layers * shape.kv_heads * 8 * self.bag  # the newest token's slot, int64
        return slots + self.staging_bytes * self.staging_buffers + tables
