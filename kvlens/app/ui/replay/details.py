"""Tables below the player. Every number is a recorded column; what was not recorded says so."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.ui.common.chart import canvas_menu
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.parts import unmoved
from kvlens.app.ui.common.spantext import span_texts, window_range
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.replay.conditions import observed_conditions
from kvlens.budget import NO_LIMIT
from kvlens.lens.knob import NOT_RECORDED
from kvlens.lens.output import output_text
from kvlens.methods.naming import run_name
from kvlens.player.payload import cube
from kvlens.recording.metrics import head_label, metric_of
from kvlens.runs.modelcheck import verdict_words
from kvlens.text import words
from kvlens.text.plaintext import visible
from kvlens.text.units import counted, duration, full_kv, si_bytes
from kvlens.text.windows import window_sentence

LONGEST = 320
"""characters of an answer above the player; whole it is among the conditions and, token by token, in the player"""


def facts(reader: TraceReader) -> None:
    """What came out beside the expected answer, and how the run was made; failed self-checks."""
    meta = reader.meta
    budget, full = meta.budget_bytes, meta.full_kv_bytes
    no_limit = NO_LIMIT if meta.observed is None else NOT_RECORDED
    limit = no_limit if budget is None else f"held to {si_bytes(budget)}"
    if budget is not None and full:
        limit += f", {budget / full:.1%} of {full_kv(meta.dtype)} ({si_bytes(full)})"
    checks = reader.self_checks()
    passed = (
        f"self-checks passed {int(checks['passed'].sum())}/{len(checks)}" if len(checks) else "self-checks not recorded"
    )
    dtype = f", {meta.dtype or 'dtype not recorded'}" if budget is None or not full else ""  # else the budget says it
    drawn = f"temperature {meta.temperature:g}, top-p {meta.top_p or 1:g}, " if meta.temperature else ""
    reuse = " · prompt reused" if meta.prompt_kept else ""
    fed = "Fed, full KV's tokens" if meta.forced else "Generated"
    expected = f"Expected answer: {in_a_line(str(meta.answer))} · " if meta.answer else ""
    with st.container(key="facts"):
        st.text(
            visible(
                f"{expected}{fed}: {in_a_line(output_text(reader))} · {limit} · {counted(reader.n_steps, 'step')} · "
                f"{meta.device or 'device not recorded'}{dtype} · {drawn}"
                f"seed {'not recorded' if meta.seed is None else meta.seed} · {passed} · "
                f"{verdict_words(meta.model_check)}{reuse}"
            )
        )
    if meta.windows:
        st.caption(plain(window_sentence(meta.windows)))
    if len(checks) and not checks["passed"].all():
        failed = ", ".join(checks.loc[~checks["passed"], "name"]).replace("_", " ")
        st.error(plain(f"Self-checks failed: {failed}. Do not rely on this run before you know why."))


def in_a_line(text: str) -> str:
    """An answer with its line ends marked, its middle left out where it is long."""
    line = text.strip().replace("\r\n", "\n").replace("\n", "⏎")
    return line if len(line) <= LONGEST else f"{line[: LONGEST * 3 // 4].rstrip()} … {line[-LONGEST // 4 :].lstrip()}"


def _title(reader: TraceReader) -> str:
    return run_name(reader.meta)


def conditions(reader: TraceReader) -> None:
    """The effective configuration, the self-checks and everything else a run says of itself."""
    checks, meta = reader.self_checks(), reader.meta
    left_column, right = st.columns(2)
    with left_column.expander("Effective configuration"):
        st.code(visible(json.dumps(meta.config, indent=1, ensure_ascii=False)), language="json")
    with right.expander("Self-checks and conditions"):
        if meta.observed is not None:
            st.text(visible("\n".join(observed_conditions(meta.observed))))
        st.dataframe(checks.assign(name=checks["name"].str.replace("_", " ")), hide_index=True, width="stretch")
        rest = {
            key: value for key, value in meta.to_row().items() if key not in ("config", "prompt_text", "model_info")
        }
        st.code(visible(json.dumps(rest, indent=1, ensure_ascii=False)), language="json", height=240)


def attended(reader: TraceReader, selection: Selection) -> None:
    """The spans that the selected head attended at the selected step."""
    step, layer, head = selection.step or 0, selection.layer or 0, selection.head or 0
    _spans(reader, step, layer, head, head_label(layer, head, reader.q_heads // reader.kv_heads), selection.span)


def decided(reader: TraceReader, selection: Selection) -> None:
    """Transfers of the selected step, and what was decided for the selected KV head."""
    _transfers(reader, selection.step or 0)
    _events(
        reader, selection.step or 0, selection.layer or 0, (selection.head or 0) // (reader.q_heads // reader.kv_heads)
    )


def player_menu(reader: TraceReader, selection: Selection, key: str) -> None:
    """What the player shows, to take away: its pictures, and the chosen metric of all heads and steps. `key`: the
    player's."""
    if selection.metric is None:
        return
    step, metric = selection.step or 0, metric_of(selection.metric)
    label = head_label(selection.layer or 0, selection.head or 0, reader.q_heads // reader.kv_heads)
    caption = f"{metric.label} at step {step}; over steps: {label}\n{_title(reader)}, {reader.uid}"
    canvas_menu(lambda: metric_table(reader, metric.name), f"{reader.uid}-{metric.name}", key, caption)


def metric_table(reader: TraceReader, name: str) -> pd.DataFrame:
    """step, layer, q_head, kv_head and the metric with its unit, a row per step and query head; NaN: not recorded."""
    values = cube(reader, name)
    step, layer, head = (axis.ravel() for axis in np.indices(values.shape))
    kv_head = head // (reader.q_heads // reader.kv_heads)
    return pd.DataFrame(
        {"step": step, "layer": layer, "q_head": head, "kv_head": kv_head, metric_of(name).label: values.ravel()}
    )


def _spans(reader: TraceReader, step: int, layer: int, head: int, label: str, selected: int | None) -> None:
    st.markdown(f"##### What {label} attended at step {step}")
    listed = reader.head_spans(step, layer, head)
    table = listed[listed["mass"] > 0]
    if table.empty:
        st.caption("Attention per span was not recorded for this step.")
        return
    tokens = reader.tokens()
    window = window_range(reader.spans(), step, int(tokens["step"].isna().sum()) + step)
    ranges = [
        window if kind == "window" else (int(a), int(b))
        for kind, a, b in zip(table["kind"], table["tok_start"], table["tok_end"], strict=True)
    ]
    shown = pd.DataFrame(
        {
            "span": table["span"].astype("Int64"),
            "mass": table["mass"],
            "state while it attended": table["state"].map(words.state),
            "state after": table["state_after"].map(words.state),
            "kind": table["kind"],
            "tokens": [f"{start}–{end - 1}" if end > start else "none yet" for start, end in ranges],
            "text": span_texts(tokens, ranges),
            "why it is a span": table["reason"],
        }
    )
    if selected in set(table["span"]):
        shown.insert(0, "selected", ["●" if span == selected else "" for span in shown["span"]])
    columns = {
        "mass": st.column_config.ProgressColumn("mass (share)", min_value=0.0, max_value=1.0, format="%.4f"),
        "text": st.column_config.TextColumn(width="large"),
    }
    st.dataframe(shown, hide_index=True, width="stretch", column_config=columns, height=min(300, 38 + 35 * len(shown)))
    if reader.tells_moments():
        st.caption(
            "The mass belongs to the state in which the query head attended the span. *state after* shows a change "
            "after the attention."
        )
    else:
        st.caption(
            "This trace holds a span's state at the end of a step only. The query head may have attended the span in "
            "another state."
        )
    st.caption(mass_caption(listed.attrs["tail_mass"], selected, {int(span) for span in table["span"]}))


def mass_caption(tail: float, selected: int | None, listed: set[int]) -> str:
    """What the list leaves out. `tail`: mass on spans that are not listed, NaN when not recorded."""
    if pd.isna(tail):
        text = "The mass of the spans that are not listed was not recorded."
    else:
        text = f"Spans that are not listed hold {tail:.4f} together, so the listed ones hold {1 - tail:.4f}."
    text += " A mass that full attention did not list has a precision of about ±√mass/255."
    if selected is not None and selected not in listed:
        text += f" The selected span {selected} is not in this list."
    return text


def _transfers(reader: TraceReader, step: int) -> None:
    table = reader.transfers(step=step)
    sums = table.groupby("direction")["bytes"].sum()
    times = reader.transfer_times()
    copies = counted(int(times.loc[times["step"] == step, "n"].sum()), "copy", "copies")
    st.markdown(f"##### Moved at step {step}")
    if reader.meta.lacks("transfer"):
        st.caption(unmoved(reader, ""))
        return
    st.caption(
        f"All layers: {si_bytes(sums.get('h2d', 0))} to the device, {si_bytes(sums.get('d2h', 0))} to host memory, "
        f"in {copies}; the engine waited {duration(float(table['wait_us'].sum()))} for them "
        f"(link {reader.meta.link or 'not recorded'})."
    )
    if table.empty:
        return
    shown = pd.DataFrame(
        {
            "direction": table["direction"].map({"h2d": "to device", "d2h": "to host memory"}),
            "cause": table["cause"],
            "layer": table["layer"].astype("Int64"),
            "KV head": table["kv_head"].map(lambda head: "all" if pd.isna(head) else str(int(head))),
            "span": table["span"].map(lambda span: "–" if pd.isna(span) else str(int(span))),
            "bytes": table["bytes"].astype("int64"),
            "copy (µs)": (table["end_us"] - table["start_us"]).astype("int64"),
            "wait (µs)": table["wait_us"].astype("int64"),
            "blocking": table["blocking"].astype(bool),
        }
    )
    st.dataframe(shown, hide_index=True, width="stretch", height=min(250, 38 + 35 * len(shown)))


def event_value(kind: str, value: float) -> str:
    """An event's value with its unit: tokens of a span that was refused, evicted or held, bytes of a span that was
    moved."""
    if pd.isna(value):
        return "–"
    in_tokens = kind in ("refused", "evict", "offload", "hold", "drop", "part")
    return counted(value, "token") if in_tokens else f"{value:,.6g} bytes"


_MOMENTS = {False: "before its attention", True: "after its attention"}


def _events(reader: TraceReader, step: int, layer: int, kv_head: int) -> None:
    table = reader.events(step=step, layer=layer, kv_head=kv_head)
    st.markdown(f"##### Decided at step {step} for L{layer} KV{kv_head}")
    if table.empty:
        lacking = reader.meta.lacks("event")
        text = (
            "Events were not recorded in this run." if lacking else "No event was logged for this KV head at this step."
        )
        st.caption(text)
        return
    shown = pd.DataFrame(
        {
            "event": table["kind"].map(words.event),
            "when": table["after_attention"].map(_MOMENTS).fillna("not recorded"),
            "span": table["span"].map(lambda span: "–" if pd.isna(span) else str(int(span))),
            "query head": table["q_head"].map(lambda head: "–" if pd.isna(head) else f"Q{int(head)}"),
            "KV head": table["kv_head"].map(lambda head: "–" if pd.isna(head) else f"KV{int(head)}"),
            "value": [event_value(kind, value) for kind, value in zip(table["kind"], table["value"], strict=True)],
        }
    )
    st.dataframe(shown, hide_index=True, width="stretch", height=min(250, 38 + 35 * len(shown)))
