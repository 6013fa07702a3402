"""The part of the reader that says what memory held, what moved, and what is recorded of the use of it."""

from __future__ import annotations

import pandas as pd

from kvlens.store import memoryqueries, queries
from kvlens.store.session import Session
from kvlens.store.versions import source

MOST_HEAD_STEPS = 200_000
"""steps x query heads whose top spans `moved_spans` joins at once; a long run of many heads is read a few layers at a
time"""


class MemoryRecords:
    """Base of TraceReader."""

    _db: Session
    n_layers: int
    q_heads: int
    kv_heads: int
    n_steps: int

    def transfers_between(self, start: int, stop: int) -> pd.DataFrame:
        """Copies that belong to steps [start, stop), in the order they began."""
        return self._db.frame(memoryqueries.TRANSFERS_BETWEEN, start=start, stop=stop)

    def phases(self) -> pd.DataFrame:
        """One row per step whose phases were timed: step, score_us, plan_us, copy_us, wait_us, attend_us, record_us,
        rest_us, together the step's dur_us (kvlens.instruments). Empty where they were not, as before schema 11."""
        return self._db.frame(queries.ALL_PHASES)

    def moved_spans(self) -> pd.DataFrame:
        """Every copy to the device and whether its span was among the top spans of the KV head's query heads while it
        could be read: step, layer, kv_head, span, cause, blocking, bytes, verdict ('listed', 'unlisted', 'pending', 'no
        span', 'not recorded'), first_step, last_step, largest_mass (of listed), at_most (of unlisted). See
        `memoryqueries.MOVED_SPANS` for what each means."""
        at_once = max(1, MOST_HEAD_STEPS // max(1, self.n_steps * self.q_heads))
        parts = [
            self._db.frame(
                memoryqueries.MOVED_SPANS,
                layers=self.n_layers,
                first_layer=layer,
                stop_layer=min(self.n_layers, layer + at_once),
                kv_heads=self.kv_heads,
                group=self.q_heads // self.kv_heads,
                steps=self.n_steps,
            )
            for layer in range(0, self.n_layers, at_once)
        ]
        table = parts[0] if len(parts) == 1 else pd.concat([part for part in parts if len(part)] or parts[:1])
        return table.sort_values(["id", "kv_head"], ignore_index=True).drop(columns="id")

    def truncation(self) -> pd.DataFrame:
        """Per layer and KV head, over the steps that recorded an ideal: moved_bytes (to the device), ideal_bytes, cells
        (how many steps). Empty where no method truncated its reuse."""
        return self._db.frame(memoryqueries.TRUNCATION.format(kv_step=source("kv_step")))
