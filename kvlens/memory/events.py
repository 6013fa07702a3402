"""What happened in the memory, in order, until the recorder takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvlens.rows import EventRow

Tell = Callable[[str, int | None, int | None, int | None, float | None], None]
"""kind, layer, KV head, span, value"""
_Batch = tuple[int, bool, int | None, Sequence[str], Sequence[int | None], Sequence[int | None], Sequence[float | None]]
"""step, whether the layer had attended in it, layer; kinds, KV heads, spans, values"""


class EventLog:
    """Events since the last `drain`. What a layer's KV heads do at once is one entry, and rows are made when somebody
    asks for them. `step`: of what is told from now on; `attended`: the layer of it that attended last, those above it
    are still to come."""

    def __init__(self) -> None:
        self.step = self.attended = -1
        self._told: list[_Batch] = []

    def tell(
        self,
        kind: str,
        layer: int | None = None,
        kv_head: int | None = None,
        span: int | None = None,
        value: float | None = None,
    ) -> None:
        """One event."""
        self._told.append((self.step, self._after(layer), layer, (kind,), (kv_head,), (span,), (value,)))

    def tell_units(
        self,
        kinds: str | Sequence[str],
        layer: int,
        kv_heads: np.ndarray,
        spans: np.ndarray,
        values: np.ndarray | None = None,
    ) -> None:
        """An event for each unit (KV head, span) [n] of a layer, in this order. kinds: one for all, or one of each;
        values: NaN: none."""
        named = (kinds,) * len(spans) if isinstance(kinds, str) else kinds
        told = np.full(len(spans), None)
        if values is not None:
            told[~np.isnan(values)] = values[~np.isnan(values)]
        units = kv_heads.tolist(), spans.tolist(), told.tolist()
        self._told.append((self.step, self._after(layer), layer, named, *units))

    def _after(self, layer: int | None) -> bool:
        return layer is not None and layer <= self.attended

    def __iter__(self) -> Iterator[EventRow]:
        for step, after, layer, kinds, kv_heads, spans, values in self._told:
            for kind, kv_head, span, value in zip(kinds, kv_heads, spans, values, strict=True):
                yield EventRow(step, layer, kv_head, None, kind, span, value, after)

    def drain(self) -> list[EventRow]:
        """Rows since the last call."""
        rows = list(self)
        self.forget()
        return rows

    def forget(self) -> None:
        """Nobody wants the rows since the last `drain`."""
        self._told.clear()
