"""The Compare page's pictures of all runs: a map each, summed up over the steps, and curves over each other."""

from __future__ import annotations

from functools import partial

import numpy as np
import streamlit as st

from kvlens.app.compare.pair import Pair
from kvlens.app.compare.together import Together, steps_named
from kvlens.app.figures.compare import map_table, run_maps
from kvlens.app.figures.comparetracks import lines_of, overlaid, track_table
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.compare import data as comparedata
from kvlens.app.ui.compare.pick import Compared
from kvlens.recording.metrics import metric_of
from kvlens.store.reader import TraceReader


def together(compared: Compared) -> Together:
    """The runs that can be laid beside B, found once."""
    runs = {name: (reader.uid, reader.stamp) for name, reader in compared.runs.items()}
    return _together(compared.runs, runs, compared.b)


@st.cache_data(max_entries=64, show_spinner=False)
def _together(_runs: dict[str, TraceReader], named: dict[str, tuple[str, int]], name: str) -> Together:
    return Together.beside(name, _runs)


def maps(compared: Compared, pair: Pair, comparable: Together, selection: Selection) -> None:
    """A map per run over the steps, and B minus A where both are among them; of two runs, whose maps at the step stand
    above, when they are looked at."""
    if selection.metric is None or len(comparable.names) < 2:
        return
    many = len(compared.runs) > 2
    key = f"compare_over_steps_{'many' if many else 'two'}"
    fold = st.expander("Maps of all runs over steps", expanded=many, key=key, on_change="rerun")
    if fold.open:
        with fold:
            _maps(compared, pair, comparable, selection.metric, (selection.layer or 0, selection.head or 0))


def _maps(compared: Compared, pair: Pair, comparable: Together, name: str, cell: tuple[int, int]) -> None:
    same, every = f"{steps_named(comparable.same)}, same context", f"{steps_named(comparable.both)} of all"
    left_column, right = st.columns([4, 3], vertical_alignment="bottom")
    ranges = {"same": same} | ({} if comparable.same == comparable.both else {"all": every})
    if st.session_state.get("compare_over") not in ranges:
        st.session_state["compare_over"] = "same"
    choice = left_column.segmented_control(
        "Over", list(ranges), key="compare_over", required=True, format_func=lambda item: ranges[item]
    )
    agg = right.segmented_control(
        "Summed up by", comparedata.AGGREGATES, default="mean", key="compare_agg", required=True
    )
    stop, how = comparable.same if choice == "same" else comparable.both, f"{agg} over {ranges[str(choice)]}"
    metric = metric_of(name)
    shown = {
        name: _map(reader, reader.uid, reader.stamp, metric.name, str(agg), stop)
        for name, reader in compared.runs.items()
        if name in comparable.names
    }
    if not any(np.isfinite(values).any() for values in shown.values()):
        st.info(f"{metric.title} was not recorded {how}.")
        return
    both = compared.a in shown
    difference = shown[compared.b] - shown[compared.a] if both else None
    chart(
        run_maps(shown, difference, pair.b.kv_heads, metric, cell, how),
        partial(map_table, shown, difference, pair.b.kv_heads, metric, how),
        f"{compared.stem}-{metric.name}",
        "compare_maps",
        f"{metric.title} of each run by layer and query head" + (", and B minus A" if both else ""),
    )
    delta = (
        f" B − A ({compared.b} minus {compared.a}) has its own, symmetric around 0: red is more in B, blue less."
        if both
        else ""
    )
    st.caption(plain(f"{metric.doc[0].upper()}{metric.doc[1:]}. The runs share one range of colours.{delta}"))


@st.cache_data(max_entries=256, show_spinner="Reading the traces…")
def _map(_reader: TraceReader, uid: str, changed: int, metric: str, agg: str, stop: int) -> np.ndarray:
    return comparedata.map_of(_reader, metric, None, agg, stop)


def curves(compared: Compared, comparable: Together, selection: Selection) -> None:
    """Curves of all runs over each other, read when they are looked at."""
    fold = st.expander("Curves of all runs, to point at and to save", key="compare_curves", on_change="rerun")
    if not fold.open:
        return
    runs = {name: reader for name, reader in compared.runs.items() if name in comparable.names}
    with fold:
        tracks = comparedata.tracks(list(runs.values()), selection.metric, selection.layer or 0, selection.head or 0)
        lines = lines_of(list(runs), [str(reader.meta.method) for reader in runs.values()])
        chart(
            overlaid(
                tracks, lines, selection.step or 0, None if comparable.same == comparable.both else comparable.same - 1
            ),
            partial(track_table, tracks, lines),
            f"{compared.stem}-tracks",
            "compare_tracks",
            "Quantities of all runs over the decode steps",
        )
