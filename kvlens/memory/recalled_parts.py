"""How many tokens the device has of spans that were recalled in part, for the log."""

from __future__ import annotations

import numpy as np

from kvlens.memory.ledger import MemoryLog
from kvlens.memory.recall_zone import RecallZone, TokenZone
from kvlens.memory.span_table import WINDOW, SpanTable


class RecalledParts:
    """Logs the event `part` with the number of tokens, where that changed. Layers that recall whole spans have none."""

    def __init__(self, spans: SpanTable, kv_heads: int, log: MemoryLog) -> None:
        self._spans, self._kv_heads, self._log = spans, kv_heads, log
        self._logged: dict[int, np.ndarray] = {}
        """of the layers that recall parts of spans, int64 [H_kv, S]: tokens that were logged; 0 of other spans"""

    def watch(self, layer: int) -> None:
        """Begin with a layer that recalls tokens or parts of spans."""
        if layer not in self._logged:
            self._logged[layer] = np.zeros((self._kv_heads, self._spans.capacity), np.int64)

    def forget(self, layer: int, kv_heads: np.ndarray, spans: np.ndarray) -> None:
        """Expect nothing of units [n] whose arrival was logged: that event stands for all of a span."""
        if layer in self._logged:
            self._logged[layer][kv_heads, spans] = 0

    def log(self, layer: int, zone: RecallZone | TokenZone) -> None:
        """Log what the zone of a layer has in part."""
        if layer not in self._logged:
            return
        tokens = self._count(zone)
        in_part = np.where(tokens < self._spans.host_lengths, tokens, 0)
        in_part[:, WINDOW] = 0
        heads, spans = np.nonzero((in_part > 0) & (in_part != self._logged[layer]))
        self._log.events_of("part", layer, heads, spans, in_part[heads, spans].astype(np.float64))
        self._logged[layer] = in_part

    def _count(self, zone: RecallZone | TokenZone) -> np.ndarray:
        """Return the tokens of each span in a zone, int64 [H_kv, S]."""
        if isinstance(zone, RecallZone):
            return zone.tables.held.numpy() * zone.page
        shape = self._kv_heads, self._spans.capacity
        heads, positions = zone.contents()
        units = heads * shape[1] + self._spans.owner[positions]
        return np.bincount(units, minlength=shape[0] * shape[1]).reshape(shape)
