"""Which query heads read the needle or the selected span: maps of full KV's mass and of the run's, in one run."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures.heads import head_map
from kvlens.app.figures.readers import SPAN_MASS, over_steps
from kvlens.app.ui.common import session
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.clicks import cell_clicked
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.common.widgets import plain
from kvlens.lens.spanreaders import SpanReaders, needle_spans, span_readers, step_mean

NEEDLE, SELECTED = "needle", "selected span"


def who_reads(reader: TraceReader, selection: Selection) -> None:
    """Draw two maps over layers and query heads, full KV's mass and this run's, and their course over the steps."""
    st.markdown("##### Who reads this span")
    if not reader.meta.sampled:
        st.info("This run recorded no full attention by span, so full KV's mass on a span is not known.")
        return
    spans = _spans(reader, selection)
    if not spans:
        st.info("No needle is marked and no span is selected. Select a span in the table or on Replay.")
        return
    masses = _readers(reader, reader.uid, reader.stamp, spans)
    cell = selection.layer or 0, selection.head or 0
    named = f"span{'s' if len(spans) > 1 else ''} {', '.join(map(str, spans[:6]))}{' …' if len(spans) > 6 else ''}"
    source_name = "Full KV" if masses.reference else "Full attention by the run's own query"
    frame = masses.frame()
    means = step_mean(masses.full), step_mean(masses.mass)
    both = np.stack(means)
    for place, (title, values) in zip(
        st.columns(2, gap="medium"), zip((source_name, "This run"), means, strict=True), strict=True
    ):
        key = f"readers_{title}_{session.revision()}_{cell[0]}_{cell[1]}"
        with place:
            chart(
                head_map(values, reader.kv_heads, SPAN_MASS, cell, f"{title}, mean of steps", fit=True, scale_of=both),
                frame,
                f"{reader.uid}-readers",
                key,
                f"{title}: mass on {named} by layer and query head",
                on_select=partial(cell_clicked, key),
            )
    curves = {source_name: masses.full[:, cell[0], cell[1]], "this run": masses.mass[:, cell[0], cell[1]]}
    label = f"L{cell[0]} Q{cell[1]}"
    curve = np.stack(list(curves.values()), 1)
    chart(
        over_steps(curves, label),
        lambda: _curve_frame(curves),
        f"{reader.uid}-readers-{label.replace(' ', '-')}",
        f"readers_steps_{session.revision()}_{cell[0]}_{cell[1]}",
        f"Mass of {label} on {named} over decode steps",
    )
    sampled, most = int(np.isfinite(curve[:, 0]).sum()), frame.nlargest(3, "full_mass")
    heads = ", ".join(f"L{row.layer} Q{row.q_head} {row.full_mass:.4f}" for row in most.itertuples())
    st.caption(
        plain(
            f"Mass on {named}, mean over {sampled} sampled steps. {source_name} gives most in "
            f"{heads}. Both maps have one colour scale. Values are lower bounds: a query head lists its top spans "
            "alone. A click selects a head."
        )
    )


def _spans(reader: TraceReader, selection: Selection) -> tuple[int, ...]:
    """The spans to look at: the needle's or the selected one, as the reader of the page chooses."""
    needle = needle_spans(reader)
    chosen_span = () if selection.span is None else (selection.span,)
    options = {NEEDLE: needle, SELECTED: chosen_span}
    names = [name for name, spans in options.items() if spans]
    if len(names) < 2:
        return options[names[0]] if names else ()
    name = st.radio("Spans", names, key="readers_spans", horizontal=True, persist_state="session")
    return options[str(name)]


def _curve_frame(curves: dict[str, np.ndarray]) -> pd.DataFrame:
    steps = len(next(iter(curves.values())))
    return pd.DataFrame({"step": range(steps), **curves})


@st.cache_data(max_entries=16, show_spinner=False)
def _readers(_reader: TraceReader, uid: str, changed: int, spans: tuple[int, ...]) -> SpanReaders:
    return span_readers(_reader, spans)
