"""The messages of all query heads of a run, for a player that cannot ask for them one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd

from kvlens.player.lens import Wanted, wanted_arrays
from kvlens.player.opening import Place
from kvlens.player.payload import pack_slice, state_changes
from kvlens.player.sparse import places, sparse
from kvlens.store.reader import TraceReader


def head_messages(reader: TraceReader, identity: str, place: Place) -> Iterator[tuple[int, int, bytes]]:
    """Yield (layer, query head, message) of every query head: the place's first, then the others of its layer.

    Messages equal `payload.slice_payload` at revision 0. Reads the trace a layer at a time."""
    spans = reader.spans()
    index = places(spans)
    group = reader.q_heads // reader.kv_heads
    for layer in sorted(range(reader.n_layers), key=lambda layer: (layer != place.layer, layer)):
        records = _Layer(reader, layer)
        states = [state_changes(spans, changes) for changes in reader.state_changes_of_layer(layer)]
        first = place.head if layer == place.layer else 0
        for head in sorted(range(reader.q_heads), key=lambda head: (head != first, head)):
            masses = sparse("head", records.of_head(records.masses, head), reader.n_steps, index)
            wanted = wanted_arrays(records.read_wanted(head), reader.n_steps, index)
            here = replace(place, layer=layer, head=head)
            header = {"payload": identity, "rev": 0}
            yield layer, head, pack_slice(header, here, states[head // group], masses, wanted)


class _Layer:
    """What the trace holds of a layer's query heads."""

    def __init__(self, reader: TraceReader, layer: int) -> None:
        self._sampled = bool(reader.meta.sampled)
        self.masses = reader.span_mass_of_layer(layer)
        if self._sampled:
            self._listed, self._lost = reader.oracle_layer(layer), reader.lost_in_layer(layer)
            self._tails = reader.oracle_tails_of_layer(layer)

    @staticmethod
    def of_head(table: pd.DataFrame, head: int) -> pd.DataFrame:
        """Return a head's rows of a table that is sorted by q_head."""
        first, last = np.searchsorted(table["q_head"].to_numpy(np.int64), (head, head + 1))
        return table.iloc[first:last]

    def read_wanted(self, head: int) -> Wanted | None:
        if not self._sampled:
            return None
        return Wanted(*(self.of_head(table, head) for table in (self._listed, self._lost, self._tails)))
