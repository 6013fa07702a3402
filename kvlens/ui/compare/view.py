"""The Compare page's sections about two runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import streamlit as st

from kvlens.compare.pair import ABSENT, KINDS, Pair, config_difference, divergence_words, run_name
from kvlens.compare.totals import delta_table
from kvlens.figures.compare import ab_maps, map_table
from kvlens.figures.comparetracks import overlaid, track_table
from kvlens.figures.metrics import metric_of
from kvlens.store.reader import TraceReader
from kvlens.text.plaintext import visible
from kvlens.text.units import counted
from kvlens.ui.common import data, lensdata, session
from kvlens.ui.common.chart import canvas_menu, chart, menu
from kvlens.ui.common.pagereader import shown_frame
from kvlens.ui.common.player import payload
from kvlens.ui.common.reportbutton import report_button
from kvlens.ui.common.state import Selection
from kvlens.ui.common.widgets import method_mark, plain
from kvlens.ui.compare import data as comparedata
from kvlens.ui.compare.player import KEY, pair_player


def names(pair: Pair) -> None:
    """What A and B are, and what may be compared."""
    left, right = st.columns([5, 1], vertical_alignment="top")
    left.text(
        visible(
            f"A: {run_name(pair.a)} · {pair.a.uid}\nB: {run_name(pair.b)} · {pair.b.uid}\nDifferences are B minus A."
        )
    )
    with left, st.container(horizontal=True):
        for letter, reader in (("A", pair.a), ("B", pair.b)):
            method = str(reader.meta.method)
            method_mark(method, data.titles().get(method), f"{letter} ")
    with right:
        report_button(pair.a, pair.b)
    if pair.apart:
        st.warning(plain(pair.apart))
        return
    st.text(divergence_words(pair))
    other = lensdata.forced_repeat(pair.a.uid, data.runs())
    if pair.divergence is not None and other is not None and other != pair.b.uid:
        st.page_link(
            "pages/compare.py",
            label="Compare B with A's forced repeat instead: the same context at every step",
            icon=":material/compare_arrows:",
            query_params={"run": other, "cmp": pair.b.uid},
        )


def differences(pair: Pair) -> None:
    """Settings that differ, the others folded away."""
    table = shown_frame(config_difference(pair.a, pair.b))
    shown, alone, same = (table.loc[table["kind"] == kind, ["setting", "A", "B"]] for kind in KINDS)
    st.markdown("##### What was set differently")
    if shown.empty:
        st.text("Nothing: both runs have the same settings.")
    else:
        st.dataframe(shown, hide_index=True, width="stretch", height=min(320, 38 + 35 * len(shown)))
        st.caption(f"{ABSENT}: the run has no such setting.")
    if len(alone):
        with st.expander(f"{counted(len(alone), 'parameter')} that only one of the methods has"):
            st.dataframe(alone, hide_index=True, width="stretch")
    with st.expander(f"{len(same)} settings are the same"):
        st.dataframe(same.drop(columns="B").rename(columns={"A": "A and B"}), hide_index=True, width="stretch")
    menu(table, f"{stem(pair)}-settings", "compare_settings", image=False)


def stem(pair: Pair) -> str:
    """How the page's files are called."""
    return f"compare-{pair.a.uid}-{pair.b.uid}"


def fit(pair: Pair, chosen: Selection) -> tuple[Selection, list[str]]:
    """The selection inside both runs: the cursor goes as far as the longer run, the metric is one that either
    recorded."""
    longer = max((pair.a, pair.b), key=lambda reader: reader.n_steps)
    inside = pair.a if (chosen.step or 0) < pair.a.n_steps else longer
    known, asked = comparedata.metrics(pair), chosen.metric
    fitted, problems = data.fit(inside, chosen.merged({"metric": None, "span": None}))
    metric = (
        asked if asked in known else data.opening_metric([name for name, where in known.items() if where == "both"])
    )
    if asked is not None and asked != metric:
        problems = [*problems, f"metric {asked[:40]!r} was recorded in neither run; showing {metric}"]
    return fitted.merged({"run": pair.a.uid, "span": chosen.span, "metric": metric}), problems


def metric_picker(pair: Pair, chosen: Selection) -> None:
    """Which metric the maps and the first curve show."""
    known = comparedata.metrics(pair)
    if not known:
        st.info("The runs recorded no figure per step and head, so there is no map to compare.")
        return

    def label(name: str) -> str:
        return metric_of(name).label + ("" if known[name] == "both" else f", recorded in {known[name]}")

    session.follow("compare_metric", chosen.metric)
    place = st.columns([1, 2])[0]
    place.selectbox(
        "Metric of maps and curves",
        list(known),
        key="compare_metric",
        format_func=label,
        on_change=lambda: session.change({"metric": st.session_state["compare_metric"]}),
    )


def player(pair: Pair, chosen: Selection, on_commit: Callable[[], None]) -> None:
    """Both runs on one cursor."""
    sent = [_payload(reader, chosen.metric) for reader in (pair.a, pair.b)]
    header = {
        "a": sent[0][0],
        "b": sent[1][0],
        "rev": session.revision(),
        "step": chosen.step or 0,
        "layer": chosen.layer or 0,
        "head": chosen.head or 0,
        "metric": chosen.metric,
        "diverged": pair.divergence,
        "maps": pair.same_shape,
        "labels": [run_name(pair.a), run_name(pair.b)],
    }
    pair_player(sent[0][1], sent[1][1], header, on_commit)
    if chosen.metric is not None and pair.same_shape:
        step, metric = chosen.step or 0, metric_of(chosen.metric)
        a, b = (comparedata.map_of(reader, metric.name, step) for reader in (pair.a, pair.b))
        caption = (
            f"{metric.label} at step {step}\nA: {run_name(pair.a)}, {pair.a.uid} · B: {run_name(pair.b)}, {pair.b.uid}"
        )
        canvas_menu(
            partial(map_table, a, b, pair.a.kv_heads, metric, f"step {step}"),
            f"{stem(pair)}-{metric.name}-step-{step}",
            KEY,
            caption,
        )
    if not pair.same_shape:
        st.caption("The models have different layers or heads, so there is no map of B minus A.")


def _payload(reader: TraceReader, metric: str | None) -> tuple[str, bytes]:
    """A run's payload under its name; another name than Replay's, which also holds the verdict on the run."""
    names = data.metrics(reader)
    loaded = payload.loaded_metrics(reader, names, metric)
    identity = payload.payload_id(f"{reader.uid}-pair", data.stamp(reader.uid), loaded)
    return identity, _packed(reader, identity, names, loaded)


@st.cache_data(max_entries=6, show_spinner="Reading the trace…")
def _packed(_reader: TraceReader, identity: str, names: list[str], loaded: list[str]) -> bytes:
    return payload.run_payload(_reader, identity, names, loaded)


def maps(pair: Pair, chosen: Selection) -> None:
    """A, B and B - A over the steps or at the step."""
    if chosen.metric is None or not pair.same_shape:
        return
    st.markdown("##### Maps")
    step, both = chosen.step or 0, min(pair.a.n_steps, pair.b.n_steps)
    until = both if pair.divergence is None else pair.divergence + 1
    same, every = f"{_steps(until)}, same context", f"{_steps(both)} of both"
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    ranges = {"step": f"step {step}", "same": same} | ({} if until == both else {"all": every})
    if st.session_state.get("compare_over") not in ranges:
        st.session_state["compare_over"] = "same"
    choice = left.segmented_control(
        "Over", list(ranges), key="compare_over", required=True, format_func=lambda item: ranges[item]
    )
    agg = right.segmented_control(
        "Summed up by",
        comparedata.AGGREGATES,
        default="mean",
        key="compare_agg",
        required=True,
        disabled=choice == "step",
    )
    at = step if choice == "step" else None
    how = f"at step {step}" if at is not None else f"{agg} over {same if choice == 'same' else every}"
    a, b = (
        comparedata.map_of(reader, str(chosen.metric), at, str(agg), until if choice == "same" else both)
        for reader in (pair.a, pair.b)
    )
    metric = metric_of(str(chosen.metric))
    if not (np.isfinite(a).any() or np.isfinite(b).any()):
        st.info(f"{metric.title} was not recorded {how}.")
        return
    chart(
        ab_maps(a, b, pair.a.kv_heads, metric, (chosen.layer or 0, chosen.head or 0), how),
        partial(map_table, a, b, pair.a.kv_heads, metric, how),
        f"{stem(pair)}-{metric.name}",
        "compare_maps",
        f"{metric.title} of A, of B, and B minus A by layer and query head",
    )
    apart = (
        ""
        if at is None or pair.same_context(step)
        else " At this step the runs have different contexts, so B − A also holds that."
    )
    st.caption(
        plain(
            f"{metric.doc[0].upper()}{metric.doc[1:]}. A and B share one range of colours; B − A has its own, "
            f"symmetric "
            f"around 0: red is more in B, blue less.{apart}"
        )
    )


def _steps(stop: int) -> str:
    return f"steps 0–{stop - 1}" if stop > 1 else "step 0"


def curves(pair: Pair, chosen: Selection) -> None:
    """Curves of both runs over each other."""
    with st.expander("The curves as a chart, to point at and to save"):
        found = comparedata.tracks(pair, chosen.metric, chosen.layer or 0, chosen.head or 0)
        chart(
            overlaid(found, chosen.step or 0, pair.divergence),
            partial(track_table, found),
            f"{stem(pair)}-tracks",
            "compare_tracks",
            "Quantities of A and B over the decode steps",
        )


_WIDE = {"quantity": st.column_config.TextColumn(width=290), "B beside A": st.column_config.TextColumn(width="medium")}


def deltas(pair: Pair) -> None:
    """Totals of both runs and what B is beside A, in words."""
    st.markdown("##### Totals")
    table = delta_table(pair.a, pair.b)
    st.dataframe(
        table.drop(columns=["unit", "value A", "value B"]),
        hide_index=True,
        width="stretch",
        height=38 + 35 * len(table),
        column_config=_WIDE,
    )
    st.caption(
        plain(
            "Bytes are decimal (1 MB = 10^6 bytes). Coverage and regret are means over all steps, layers and "
            "query heads; after "
            "the runs part, they stand for different contexts."
        )
    )
    without = [name for name, reader in (("A", pair.a), ("B", pair.b)) if "regret" not in reader.metrics()]
    if without:
        st.caption(
            plain(
                f"No regret of {' and '.join(without)}: full attention by span was not recorded in "
                f"{'these runs' if len(without) == 2 else 'this run'}."
            )
        )
    menu(table, f"{stem(pair)}-totals", "compare_totals", image=False)
