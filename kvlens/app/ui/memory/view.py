"""The Memory page: what each tier held, what moved and when, where spans lay, what was moved and not used."""

from __future__ import annotations

from typing import cast

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures import memory as figures
from kvlens.app.figures.overlap import COPIES, whole
from kvlens.app.figures.overlap import overlap as overlap_figure
from kvlens.app.ui.common import parts, sentences
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.state import Selection, parse_steps
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.memory import data as memorydata
from kvlens.app.ui.memory.heads import by_head
from kvlens.app.ui.memory.phases import phases
from kvlens.app.ui.memory.states import where_spans_lay
from kvlens.app.ui.memory.tracefile import trace_file
from kvlens.app.ui.memory.use import use
from kvlens.holds import Drop, Hold, held_bytes, tokens_of
from kvlens.lens.knob import NOT_RECORDED
from kvlens.meta import RunMeta
from kvlens.store.cells import recorded_total
from kvlens.store.errors import NotRecorded
from kvlens.tables.latency import latency
from kvlens.text.units import counted, duration, full_kv, si_bytes

#: Steps of the overlap timeline when none were chosen; fewer steps where they have more copies than this.
_FIRST_LOOK, _FIRST_COPIES = 8, 600


def show(reader: TraceReader, selection: Selection) -> dict[str, str]:
    """All sections; returns the page's own URL parameters."""
    copies = memorydata.moved_spans(reader, reader.uid, reader.stamp)
    totals(reader, copies)
    residency(reader)
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        parts.bytes_by_cause(reader)
    with right:
        parts.times(reader)
    phases(reader)
    query = overlap(reader, selection)
    by_head(reader, selection, copies)
    where_spans_lay(reader, selection)
    use(reader, copies)
    trace_file(reader)
    return query


def totals(reader: TraceReader, copies: pd.DataFrame) -> None:
    """The run in six numbers. `copies` as of `memorydata.moved_spans`."""
    steps, meta = reader.steps(), reader.meta
    full = meta.full_kv_bytes
    peak, moved = float(steps["peak_bytes"].max()), recorded_total(steps["h2d_bytes"])
    cells = (
        (
            "Peak on the device",
            si_bytes(peak),
            f"{peak / full:.1%} of {full_kv(meta.dtype)}" if full else "full KV not recorded",
        ),
        ("Budget", _budget(meta), f"full KV {si_bytes(full)}"),
        ("Moved to the device", si_bytes(moved), f"{si_bytes(moved / max(1, len(steps)))} per decode step"),
        ("Moved to host memory", si_bytes(recorded_total(steps["d2h_bytes"])), "while decoding"),
        ("Time per token after the first", *_token_time(reader)),
        ("Moved, not used", *(("not recorded", "") if meta.lacks("transfer") else _redundant(copies))),
    )
    for place, (label, value, note) in zip(st.columns(len(cells)), cells, strict=True):
        place.metric(label, value, note, delta_color="off", delta_arrow="off")
    if meta.raced:
        st.caption(
            f"This run was one of {meta.raced} lanes of a race. Its copies went on during the turns of other lanes, so "
            "its waits are shorter than in a run alone."
        )
    if meta.batched:
        st.caption(f"The steps of {meta.batched} prompts were computed together: a step's time is that of all.")


def _token_time(reader: TraceReader) -> tuple[str, str]:
    """Mean duration of a step after the first token, and the link that its copies went through."""
    per_token, link = latency(reader).per_token, f"link {reader.meta.link or 'not recorded'}"
    return (duration(per_token) if np.isfinite(per_token) else "not recorded"), link


def _redundant(copies: pd.DataFrame) -> tuple[str, str]:
    """Bytes to the device whose span no query head listed, and their share; see the section at the end of the page for
    what it means."""
    if copies.empty:
        return "0 B", "nothing moved"
    if not memorydata.judged(copies):
        return "not recorded", "use of copies"
    idle = float(copies.loc[copies["verdict"] == "unlisted", "bytes"].sum())
    return si_bytes(idle), f"{idle / copies['bytes'].sum():.1%} of that, a bound: see below"


def residency(reader: TraceReader) -> None:
    """Bytes per tier over the steps, with the lines they are measured against."""
    st.markdown("##### What each tier held")
    steps, meta = reader.steps(), reader.meta
    budget, full = meta.budget_bytes, meta.full_kv_bytes
    lines = steps.assign(budget_bytes=budget, full_kv_bytes=full)
    chart(
        figures.residency(steps, budget, full),
        lines,
        f"{reader.uid}-steps",
        "residency",
        "KV bytes by tier per decode step",
    )
    no_line = sentences.NO_LIMIT_SET if meta.observed is None else NOT_RECORDED
    limit = no_line if budget is None else f"the budget is {si_bytes(budget)}"
    prefill = meta.prefill_peak_bytes
    prefill_bytes = "not recorded" if prefill is None else si_bytes(prefill)
    st.caption(
        plain(
            f"Bytes are decimal (1 MB = 10^6 bytes); {limit}. On the device, whole storages count: used and free "
            f"slots, tables, summaries, a method's index, staging. Full KV ({si_bytes(full)}) counts keys and values "
            "alone, of the prompt and all requested tokens. The peak of a method that keeps everything is slightly "
            f"above it. Prefill has the whole prompt on the device and is not drawn; its peak: {prefill_bytes}."
        )
    )
    if meta.unannounced_bytes:
        size = si_bytes(meta.unannounced_bytes)
        st.caption(plain(f"The method holds {size} that it does not announce. The bytes on the device count them."))
    if holds := meta.hold:
        held = [Hold(**part.to_row()) for part in holds]
        size = _size_of(reader, held)
        st.caption(
            plain(
                f"This run is a what-if: {tokens_of(held):,} tokens are held on the device beside the budget, {size} "
                "of keys and values. The curves include them and may pass the budget."
            )
        )
    if drops := meta.drop:
        left_out = tokens_of([Drop(**part.to_row()) for part in drops])
        st.caption(
            f"This run is a what-if: {counted(left_out, 'token is', 'tokens are')} dropped: some KV heads do "
            "not attend them. They stay stored: the drop frees and moves no byte."
        )
    if steps["cold_bytes"].eq(0).all():
        st.caption(sentences.NOTHING_IN_HOST_MEMORY)


def _budget(meta: RunMeta) -> str:
    """Return the budget in bytes, 'no limit', or 'not recorded' of an observed run."""
    if meta.budget_bytes is not None:
        return si_bytes(meta.budget_bytes)
    return "no limit" if meta.observed is None else "not recorded"


def _size_of(reader: TraceReader, held: list[Hold]) -> str:
    """Return the bytes of what is held, in words; 'not recorded' if the trace lacks the model's sizes."""
    try:
        return si_bytes(held_bytes(held, reader.kv_shape()))
    except NotRecorded:
        return si_bytes(None)


def overlap(reader: TraceReader, selection: Selection) -> dict[str, str]:
    """Copies of a range of steps beside these steps, and how much of the moving was not waited for."""
    st.markdown("##### When copies ran")
    moved = reader.transfer_times()
    if not (moved["step"] >= 0).any():
        st.info(parts.unmoved(reader, "No copy was made while decoding, so there is nothing to lay beside the steps."))
        return {}
    start, end = _step_range(reader, selection, moved)
    steps = reader.steps()
    steps = steps[(steps["step"] >= start) & (steps["step"] <= end)]
    near = reader.transfers_between(max(0, start - 1), end + 1)
    rows = near[near["step"] >= start]
    copies = whole(rows)
    chart(
        overlap_figure(steps, copies.head(COPIES)),
        rows,
        f"{reader.uid}-copies-steps-{start}-{end}",
        "overlap",
        "Copies over time beside the engine's steps",
    )
    if len(copies) > COPIES:
        st.warning(f"Of {len(copies):,} copies the first {COPIES:,} are drawn; choose fewer steps to see all.")
    link = plain(str(reader.meta.link or "not recorded"))
    st.caption(_overlap_text(len(copies), memorydata.overlap(steps, near), link))
    return {"steps": f"{start}-{end}"} if f"memory_steps_{reader.uid}" in st.session_state else {}


def _overlap_text(count: int, sums: memorydata.Overlap, link: str) -> str:
    share = f" ({sums.unwaited / sums.moving:.0%})" if sums.moving else ""
    waited = (
        f"The engine waited {duration(sums.waited)}, queueing and unpacking included. It did not wait for at least "
        f"{duration(sums.unwaited)}{share} of the copy time: a blocking copy runs beside the step until its attention."
    )
    if np.isnan(sums.waited):
        waited = "How long the engine waited was not recorded."
    return (
        f"{counted(count, 'copy belongs', 'copies belong')} to these steps; link: {link}. Copies took "
        f"{duration(sums.moving)} of the steps (blocking {duration(sums.blocking)}, background "
        f"{duration(sums.background)}; overlaps count once). {waited} Solid: blocking, hatched: in the background. A "
        "bar is at least two pixels wide. Drag to zoom, double-click to return."
    )


def _step_range(reader: TraceReader, selection: Selection, moved: pd.DataFrame) -> tuple[int, int]:
    last = reader.n_steps - 1
    if last < 1:
        return 0, 0
    key = f"memory_steps_{reader.uid}"
    if key not in st.session_state:
        requested = st.query_params.get("steps")
        st.session_state[key] = parse_steps(requested, last) if requested else _first_look(selection, moved, last)
    start, end = cast("tuple[int, int]", st.slider("Steps, first and last", 0, last, key=key, persist_state="session"))
    return int(start), int(end)


def _first_look(selection: Selection, moved: pd.DataFrame, last: int) -> tuple[int, int]:
    """Return the first and last step of the range that the page opens with: the selected step and those after it. At
    the run's end, steps before it fill the range."""
    counts = moved.groupby("step")["n"].sum().reindex(range(last + 1), fill_value=0).tolist()
    start = end = min(selection.step or 0, last)
    copies = counts[start]
    while end - start + 1 < _FIRST_LOOK and (end < last or start > 0):
        copies += counts[end + 1 if end < last else start - 1]
        if copies > _FIRST_COPIES:
            break
        start, end = (start, end + 1) if end < last else (start - 1, end)
    return start, end
