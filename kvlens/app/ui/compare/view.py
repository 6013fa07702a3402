"""The Compare page's part about two of its runs: what A and B are, and both on one cursor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import streamlit as st

from kvlens.app.compare.pair import Pair, divergence_words
from kvlens.app.figures.compare import map_table
from kvlens.app.ui.common import comparing, data, lensdata, session
from kvlens.app.ui.common.chart import canvas_menu
from kvlens.app.ui.common.reportbutton import report_button
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.compare import data as comparedata
from kvlens.app.ui.compare.pick import Compared
from kvlens.app.ui.compare.player import KEY, pair_player
from kvlens.player import payload
from kvlens.player.opening import opening_metric
from kvlens.recording.metrics import metric_of
from kvlens.store.reader import TraceReader


def head(compared: Compared, pair: Pair, selection: Selection, maps: bool) -> None:
    """The metric, what may be compared of A and B, and the report on both. maps: there is a map to choose it for."""
    left_column, middle, right = st.columns([4, 7, 2.2], vertical_alignment="bottom")
    if maps:
        with left_column:
            metric_picker(pair, selection)
    with right:
        report_button(pair.a, pair.b)
    with middle:
        if pair.apart:
            st.warning(plain(pair.apart))
            return
        st.text(divergence_words(pair))
        if pair.divergence is not None:
            _forced_repeats(compared, pair)


def _forced_repeats(compared: Compared, pair: Pair) -> None:
    """The forced repeats of A and of B, where they are stored and not among the runs: they join them."""
    table = data.runs()
    for name, reader, other_reader in ((compared.a, pair.a, pair.b), (compared.b, pair.b, pair.a)):
        repeat = lensdata.forced_repeat(reader.uid, table)
        if repeat is not None and repeat not in compared.comparison.runs:
            st.page_link(
                comparing.PAGE,
                label=plain(f"Add the forced repeat of {name}: the same context at every step"),
                icon=":material/compare_arrows:",
                query_params=comparing.link(other_reader.uid, repeat, against=other_reader.uid),
            )


def fit(pair: Pair, selection: Selection) -> tuple[Selection, list[str]]:
    """The selection inside both runs: the cursor goes as far as the longer run, the metric is one that either
    recorded."""
    longer = max((pair.a, pair.b), key=lambda reader: reader.n_steps)
    inside = pair.b if (selection.step or 0) < pair.b.n_steps else longer
    owners, metric_name = comparedata.metrics(pair), selection.metric
    fitted, problems = data.fit(inside, selection.merged({"metric": None, "span": None}))
    metric = (
        metric_name
        if metric_name in owners
        else opening_metric([name for name, where in owners.items() if where == "both"])
    )
    if metric_name is not None and metric_name != metric:
        problems = [*problems, f"metric {metric_name[:40]!r} was recorded in neither run; showing {metric}"]
    return fitted.merged({"run": pair.b.uid, "span": selection.span, "metric": metric}), problems


def metric_picker(pair: Pair, selection: Selection) -> None:
    """Which metric the maps and the first curve show."""
    owners = comparedata.metrics(pair)
    if not owners:
        st.info("The runs recorded no figure per step and head, so there is no map to compare.")
        return

    def label(name: str) -> str:
        return metric_of(name).label + ("" if owners[name] == "both" else f", recorded in {owners[name]}")

    session.follow("compare_metric", selection.metric)
    st.selectbox(
        "Metric of maps and curves",
        list(owners),
        key="compare_metric",
        format_func=label,
        on_change=lambda: session.change({"metric": st.session_state["compare_metric"]}),
    )


def player(compared: Compared, pair: Pair, selection: Selection, on_commit: Callable[[], None]) -> None:
    """Both runs on one cursor, where they are all there is; of more runs two are played when they are looked at."""
    two = len(compared.runs) == 2
    label = plain(f"Step by step: {compared.b} (B) and {compared.a} (A)")
    key = f"compare_pair_{'two' if two else 'many'}"
    fold = st.expander(label, expanded=two, key=key, on_change="rerun")
    if fold.open:
        with fold:
            _player(compared, pair, selection, on_commit)


def _player(compared: Compared, pair: Pair, selection: Selection, on_commit: Callable[[], None]) -> None:
    sent = [_payload(reader, selection.metric) for reader in (pair.a, pair.b)]
    header = {
        "a": sent[0][0],
        "b": sent[1][0],
        "rev": session.revision(),
        "step": selection.step or 0,
        "layer": selection.layer or 0,
        "head": selection.head or 0,
        "metric": selection.metric,
        "diverged": pair.divergence,
        "maps": pair.same_shape,
        "labels": [compared.a, compared.b],
    }
    pair_player(sent[0][1], sent[1][1], header, on_commit)
    if selection.metric is not None and pair.same_shape:
        step, metric = selection.step or 0, metric_of(selection.metric)
        a, b = (comparedata.map_of(reader, metric.name, step) for reader in (pair.a, pair.b))
        caption = f"{metric.label} at step {step}\nA: {compared.a}, {pair.a.uid} · B: {compared.b}, {pair.b.uid}"
        canvas_menu(
            partial(map_table, {"A": a, "B": b}, b - a, pair.a.kv_heads, metric, f"step {step}"),
            f"compare-{pair.a.uid}-{pair.b.uid}-{metric.name}-step-{step}",
            KEY,
            caption,
        )
    if not pair.same_shape:
        st.caption("The models have different layers or heads, so there is no map of B minus A.")


def _payload(reader: TraceReader, metric: str | None) -> tuple[str, bytes]:
    """A run's payload under its name; another name than Replay's, which also holds the verdict on the run."""
    names = data.metrics(reader)
    loaded = payload.loaded_metrics(reader, names, metric)
    identity = payload.payload_id(f"{reader.uid}-pair", reader.stamp, loaded)
    return identity, _packed(reader, identity, names, loaded)


@st.cache_data(max_entries=6, show_spinner="Reading the trace…")
def _packed(_reader: TraceReader, identity: str, names: list[str], loaded: list[str]) -> bytes:
    return payload.run_payload(_reader, identity, names, loaded)
