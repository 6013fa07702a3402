"""The Heads page: controls, figures with click, table and downloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures.drawn import map_frame, unit_name
from kvlens.app.figures.heads import head_histogram, head_map
from kvlens.app.figures.timeline import head_timeline
from kvlens.app.ui.common import data, sentences, session
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.clicks import cell_clicked, clicked
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.download import downloads
from kvlens.app.ui.common.state import Selection, parse_steps
from kvlens.app.ui.common.summaries import summary
from kvlens.app.ui.common.widgets import headings
from kvlens.app.ui.heads.data import AGGREGATES, Series, series
from kvlens.player.opening import opening_metric
from kvlens.recording.metrics import Metric, head_label, metric_of, value_text


@dataclass(frozen=True)
class View:
    """What the page shows: the shared selection and the page's own range and aggregate."""

    chosen: Selection
    metric: Metric
    agg: str
    start: int
    stop: int
    """one past the last step"""
    whole: bool
    """all steps of the run"""
    fit: bool
    """colours span the recorded values"""

    def query(self) -> dict[str, str]:
        """The page's own URL parameters; left out where they are the default."""
        return ({} if self.agg == "mean" else {"agg": self.agg}) | (
            {} if self.whole else {"steps": f"{self.start}-{self.stop - 1}"}
        )

    @property
    def cell(self) -> tuple[int, int]:
        return self.chosen.layer or 0, self.chosen.head or 0


def controls(reader: TraceReader, selection: Selection) -> View | None:
    """Metric, aggregate and step range; None when the run holds no figures per head."""
    names = data.summary_metrics(reader)
    if not names:
        st.info("This run recorded no figures per head, so there is nothing to map.")
        return None
    name = selection.metric if selection.metric in names else opening_metric(names)
    left_column, middle, third, right = st.columns([3, 2, 2, 5], vertical_alignment="bottom")
    session.follow("heads_metric", name)
    left_column.selectbox(
        "Metric", names, key="heads_metric", format_func=lambda item: metric_of(item).label, on_change=_metric_picked
    )
    if "heads_agg" not in st.session_state:
        requested = st.query_params.get("agg", "mean")
        st.session_state["heads_agg"] = requested if requested in AGGREGATES else "mean"
    agg = middle.selectbox("Over the steps", AGGREGATES, key="heads_agg", persist_state="session")
    fit = third.toggle(
        "Fit colours",
        key="heads_fit",
        persist_state="session",
        help="Colours span the recorded values, not the natural range.",
    )
    last = reader.n_steps - 1
    if reader.meta.trace_level == "summary" or last < 1:
        right.caption(sentences.NO_FIGURES_PER_STEP if last else "This run has one step.")
        start, end = 0, last
    else:
        start, end = _step_range(reader, right, last)
    return View(selection, metric_of(str(name)), str(agg), start, end + 1, (start, end) == (0, last), bool(fit))


def _step_range(reader: TraceReader, place: st.delta_generator.DeltaGenerator, last: int) -> tuple[int, int]:
    key = f"heads_steps_{reader.uid}"
    if key not in st.session_state:
        st.session_state[key] = parse_steps(st.query_params.get("steps"), last)
    start, end = cast(
        "tuple[int, int]", place.slider("Steps, first and last", 0, last, key=key, persist_state="session")
    )
    return int(start), int(end)


def _metric_picked() -> None:
    session.change({"metric": st.session_state["heads_metric"]})


def figures(reader: TraceReader, view: View) -> None:
    """Map and spread beside the selected head's curve; clicks move the shared selection."""
    values = summary(reader, view.metric.name, view.agg, view.start, view.stop)
    layer, head = view.cell
    group = reader.q_heads // reader.kv_heads
    label = head_label(layer, head, group)
    how = f"{view.agg} over steps {view.start}–{view.stop - 1}"
    st.text(
        f"{view.metric.title}: {view.metric.doc}."
        + (" A figure of the KV head, shown for each of its query heads." if view.metric.level == "kv" else "")
    )
    left_column, right = st.columns([11, 9], gap="medium")
    with left_column:
        key = f"map_{session.revision()}_{layer}_{head}"
        steps = f"steps-{view.start}-{view.stop - 1}"
        chart(
            head_map(values, reader.kv_heads, view.metric, (layer, head), how, view.fit),
            lambda: map_frame(values, reader.kv_heads, view.metric, view.agg),
            f"{reader.uid}-{view.metric.name}-{view.agg}-{steps}",
            key,
            f"{view.metric.title} by layer and query head",
            on_select=lambda: cell_clicked(key),
        )
        st.text(f"Selected: {label}, {how}: {value_text(float(values[layer, head]), view.metric)}")
    with right:
        curve: Series = series(reader, view.metric.name, layer, head)
        if np.isfinite(curve.values).any():
            name = f"timeline_{session.revision()}_{view.chosen.step}"
            chart(
                head_timeline(curve.values, view.metric, label, view.chosen.step or 0, view.start, view.stop),
                pd.DataFrame({"step": range(curve.values.size), unit_name(view.metric): curve.values}),
                f"{reader.uid}-{view.metric.name}-L{layer}-Q{head}",
                name,
                f"{view.metric.title} of {label} over decode steps",
                on_select=lambda: _step_clicked(name),
            )
        else:
            st.info(f"{view.metric.title} was not recorded per step for {label}.")
        chart(
            head_histogram(values, view.metric, (layer, head)),
            lambda: map_frame(values, reader.kv_heads, view.metric, view.agg),
            f"{reader.uid}-{view.metric.name}-{view.agg}-{steps}",
            "spread",
            "Spread over query heads",
        )


def _step_clicked(key: str) -> None:
    if len(step := clicked(key)) == 1:
        session.change({"step": step[0]})


def table(reader: TraceReader, view: View) -> None:
    """All heads with their statistics, sortable; a selected row selects the head."""
    where = f"steps {view.start}–{view.stop - 1}" + (", all of the run" if view.whole else "")
    st.markdown(f"##### All query heads, {where}")
    stats = reader.head_table(view.start, view.stop)
    shown = stats.drop(columns=["run_uid", "method", "model"])
    key = f"head_table_{session.revision()}"
    st.dataframe(
        shown,
        hide_index=True,
        width="stretch",
        height=340,
        key=key,
        on_select=lambda: _row_clicked(key, stats),
        selection_mode="single-row",
        column_config=headings(shown.columns),
    )
    st.caption(
        "None: not recorded. What belongs to the KV head repeats over its query heads; point at a heading to read what "
        "it is. Files have the columns of docs/trace-schema.md."
    )
    downloads(reader, view.start, view.stop, view.whole)


def _row_clicked(key: str, stats: object) -> None:
    rows = st.session_state[key]["selection"]["rows"]
    if rows:
        row = stats.iloc[rows[0]]  # type: ignore[attr-defined]
        session.change({"layer": int(row["layer"]), "head": int(row["q_head"])})
