"""What if a span had been there: the choice of what to hold, and what came of it."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from kvlens.figures.metrics import si_bytes
from kvlens.lens.verdict import Verdict
from kvlens.ui import lensdata, lensjobs
from kvlens.ui.data import TraceReader
from kvlens.ui.lensdata import WhatIf
from kvlens.ui.request import HoldChoice
from kvlens.ui.state import Selection
from kvlens.ui.widgets import plain

_RESTORED = {True: "yes", False: "no", None: "cannot be told"}


def form(reader: TraceReader, chosen: Selection, found: Verdict, busy: bool) -> None:
    """The selected span (else the one of the verdict), for which heads and from which step."""
    missed = found.missed
    span = chosen.span if chosen.span is not None else (missed.span if missed is not None else None)
    if span is None:
        st.markdown("**What if it had been there?** Click a token of a span to choose it.")
        return
    st.markdown(f"**What if span {span} had been there?**")
    layer, head = _head(reader, chosen, found)
    places = {
        f"all {reader.n_layers} layers, all {reader.kv_heads} KV heads": ("all", "all"),
        f"L{layer}, all KV heads": (str(layer), "all"),
        f"L{layer} KV{head} alone": (str(layer), str(head)),
    }
    left, right = st.columns([3, 2])
    where = left.selectbox("Hold it for", list(places), key=f"hold_for_{reader.uid}_{layer}_{head}", persist_state="session")
    start = right.number_input("from step", 0, reader.n_steps - 1, found.step, key=f"hold_from_{reader.uid}", persist_state="session")
    layers, heads = places[str(where)]
    with st.container(horizontal=True):
        hold = st.button("Hold it resident", type="primary", icon=":material/push_pin:", disabled=busy)
        how = "Repeats the run again and again, heads with most regret first, until the answer is back."
        search = st.button("Find the smallest set of heads", icon=":material/search:", disabled=busy, help=how)
    st.caption(
        "The run is repeated with this span's exact keys and values on the device, all else the same. Click a token for another span."
    )
    if hold or search:
        st.query_params["job"] = lensjobs.start_whatif(reader.uid, HoldChoice(span, layers, heads, int(start), search))
        st.rerun()


def _head(reader: TraceReader, chosen: Selection, found: Verdict) -> tuple[int, int]:
    """(layer, KV head) that 'alone' means: the selected one."""
    return chosen.layer or 0, (chosen.head or 0) // (reader.q_heads // reader.kv_heads)


def tried(reader: TraceReader, table: pd.DataFrame) -> None:
    """What was tried on this run: the outcome of the one in the URL (?whatif=), else of the newest, and a list of all."""
    found = lensdata.whatifs(reader.uid, table)
    if not found:
        return
    asked = st.query_params.get("whatif")
    shown = next((one for one in found if one.uid == asked), found[0])
    st.divider()
    st.markdown(f"**Tried:** {plain(held_words(shown))}.")
    outcome(shown)
    left, right = st.columns([2, 5], vertical_alignment="center")
    left.page_link("pages/replay.py", label="Replay it with the span held", icon=":material/play_circle:", query_params={"run": shown.uid})
    if len(found) > 1:
        with right.expander(f"All {len(found)} tries on this run"):
            st.dataframe(pd.DataFrame([_row(one) for one in found]), hide_index=True, width="stretch")


def outcome(one: WhatIf) -> None:
    """Answer and divergence before and after, and what holding it would have cost."""
    said = one.summary
    if not said:
        st.caption("This repeat did not come to an end, so nothing is known of its outcome.")
        return
    answer, numbers = st.columns([5, 6], gap="large")
    answer.text(
        f"Answer before: {_line(said.get('answer_before'))}\nAnswer with it held: {_line(said.get('answer_after'))}\n"
        f"Expected: {_line(said.get('expected'))}"
    )
    step = said.get("step")
    facts = (
        ("Answer restored", _RESTORED[said.get("restored")]),
        (f"KL at step {step}, nats" if step is not None else "KL", f"{_nats(said.get('kl_before'))} → {_nats(said.get('kl_after'))}"),
        ("It would have cost", si_bytes(said.get("held_bytes"))),
    )
    for column, (label, value) in zip(numbers.columns(3), facts, strict=True):
        column.metric(label, value)
    numbers.caption(plain(_cost(one)))
    if (search := said.get("search")) is not None:
        names = ", ".join(f"L{layer} KV{head}" for layer, head in search.get("heads") or [])
        st.markdown(plain(f"Smallest set found: {names or 'none brings the answer back'} ({search.get('tried')} repeats)."))


def held_words(one: WhatIf) -> str:
    """'span 12 (tokens 300-331) held for L0 KV1, L1 KV0 from step 3 on'."""
    spans = ", ".join(f"span {hold['span']} (tokens {hold['tok_start']}–{int(hold['tok_end']) - 1})" for hold in one.holds)
    heads = one.heads
    names = ", ".join(f"L{layer} KV{head}" for layer, head in heads[:6])
    more = f" and {len(heads) - 6} more KV heads" if len(heads) > 6 else ""
    return f"{spans} held exactly resident for {names}{more} from step {one.from_step} on"


def _cost(one: WhatIf) -> str:
    """What the held bytes are a share of."""
    held = one.summary.get("held_bytes")
    if held is None:
        return "Its bytes were not recorded."
    parts = [f"{one.summary.get('held_tokens')} tokens in {len(one.heads)} KV heads"]
    if one.full_kv_bytes:
        parts.append(f"{held / one.full_kv_bytes:.2%} of full KV")
    if one.budget_bytes:
        parts.append(f"{held / one.budget_bytes:.1%} on top of the budget")
    return " · ".join(parts)


def _row(one: WhatIf) -> dict[str, Any]:
    said = one.summary
    return {
        "spans": ", ".join(map(str, one.spans)), "KV heads": len(one.heads), "from step": one.from_step,
        "restored": _RESTORED[said.get("restored")], "KL before (nats)": said.get("kl_before"), "KL after (nats)": said.get("kl_after"),
        "answer": _line(said.get("answer_after")), "held": si_bytes(said.get("held_bytes")), "run": one.uid,
    }  # fmt: skip


def _line(text: object) -> str:
    return "not recorded" if text is None else " ".join(str(text).split()) or "nothing"


def _nats(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.3g}"
