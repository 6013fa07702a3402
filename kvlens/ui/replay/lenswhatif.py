"""What if a span had been there: the choice of what to hold, and what came of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.lens.lines import inside, joined, ranges_in_words, ranked
from kvlens.lens.verdict import Verdict
from kvlens.meta import Counterfactual
from kvlens.text.plaintext import visible
from kvlens.text.units import si_bytes
from kvlens.ui.common import comparing, lensjobs, places
from kvlens.ui.common.data import TraceReader
from kvlens.ui.common.lensdata import WhatIf
from kvlens.ui.common.player.payload import needle_tokens
from kvlens.ui.common.request import HoldChoice
from kvlens.ui.common.state import Selection
from kvlens.ui.common.widgets import plain
from kvlens.ui.replay import tour

_RESTORED = {True: "yes", False: "no", None: "cannot be told"}


def form(reader: TraceReader, chosen: Selection, found: Verdict, busy: bool, outcomes: list[WhatIf]) -> None:
    """The selected span (else the one of the verdict) or more, for which heads and from which step. `outcomes`: of what
    was tried before."""
    missed = found.missed
    span = chosen.span if chosen.span is not None else (missed.span if missed is not None else None)
    if span is None:
        st.markdown("**What if it had been there?** Click a token of a span to choose it.")
        return
    layer, head = chosen.layer or 0, (chosen.head or 0) // (reader.q_heads // reader.kv_heads)
    choices = spans_to_hold(reader, span, found)
    places = {
        "all KV heads": ("all", "all"),
        f"those of layer {layer}": (str(layer), "all"),
        f"L{layer} KV{head}": (str(layer), str(head)),
    }
    first, second, third = st.columns([5, 4, 3])
    what = first.selectbox(
        "What if it had been there? Hold", list(choices), key=f"hold_what_{reader.uid}_{span}", persist_state="session"
    )
    where = second.selectbox("for", list(places), key=f"hold_for_{reader.uid}_{layer}_{head}", persist_state="session")
    start = third.number_input(
        "from step", 0, reader.n_steps - 1, found.step, key=f"hold_from_{reader.uid}", persist_state="session"
    )
    with st.container(horizontal=True):
        exact = "Repeats the run with the exact keys and values of these tokens on the device, all else the same."
        with st.container(key=tour.HOLD, width="content"):
            hold = st.button("Hold it resident", type="primary", icon=":material/push_pin:", disabled=busy, help=exact)
        how = "Repeats the run again and again, heads with most regret first, until the answer is back."
        search = st.button("Find the smallest set of heads", icon=":material/search:", disabled=busy, help=how)
        tour.tour(reader, found, outcome_shown(outcomes).summary if outcomes else None)
    if hold or search:
        layers, heads = places[str(where)]
        st.query_params["job"] = lensjobs.start_whatif(
            reader.uid, replace(choices[str(what)], layers=layers, heads=heads, from_step=int(start), search=search)
        )
        st.rerun()


def spans_to_hold(reader: TraceReader, span: int, found: Verdict) -> dict[str, HoldChoice]:
    """What may be held, in words: the span, the tokens lost inside it, the needle's spans where more than one holds it,
    the five lines missed most at the step of loss, spans and tokens lost inside spans."""
    choices: dict[str, HoldChoice] = {}
    spans = reader.spans()
    if span not in set(spans.loc[spans["kind"] == "window", "span"]):
        choices[f"span {span}"] = _choice((span,))
    lost = inside(reader, found.step)
    for line in lost:
        if line.span == span or line is lost[0]:
            choices[line.words()] = _choice(tokens=line.tokens)
    there = spans[
        (spans["kind"] != "window") & (spans["born_step"] <= found.step) & ~(spans["died_step"] <= found.step)
    ]
    needle = needle_tokens(reader.tokens(), reader.meta.needle)
    inner = [
        int(s)
        for s, start, end in zip(there["span"], there["tok_start"], there["tok_end"], strict=True)
        if any(a < end and b > start for a, b in needle)
    ]
    if inner and inner != [span]:
        choices[f"the needle: {len(inner)} span{'s' if len(inner) > 1 else ''}"] = _choice(tuple(inner))
    most = _most_missed(reader, found.step)
    if len(most.spans) + len(most.tokens) > 1:
        what = f"the {len(most.spans)} spans missed most"
        choices[what + (f" and {ranges_in_words(most.tokens)}" if most.tokens else "")] = most
    return choices


def _most_missed(reader: TraceReader, step: int, most: int = 5) -> HoldChoice:
    """The spans and ranges of tokens of the lines missed most, which may name one of them for several KV heads."""
    spans: dict[int, None] = {}
    tokens: tuple[tuple[int, int], ...] = ()
    window = set(reader.spans().query("kind == 'window'")["span"])
    for line in ranked(reader, (step,)):
        if line.tokens:
            tokens = joined((*tokens, *line.tokens))
        elif line.span not in window:
            spans[line.span] = None
        if len(spans) + len(tokens) >= most:
            break
    return _choice(tuple(spans), tokens)


def _choice(spans: tuple[int, ...] = (), tokens: tuple[tuple[int, int], ...] = ()) -> HoldChoice:
    return HoldChoice(spans, "all", "all", 0, tokens=tokens)


def tried(found: list[WhatIf], chosen: Selection) -> None:
    """What was tried on a run: the outcome of one, and a list of all."""
    shown = outcome_shown(found)
    said, replay, both = st.columns([7, 3, 2], vertical_alignment="center")
    said.markdown(f"**Tried:** {plain(held_words(shown))}.")
    place = places.in_run(shown.uid, chosen)
    replay.page_link(
        "pages/replay.py", label="Replay it with the span held", icon=":material/play_circle:", query_params=place
    )
    run = str(chosen.run)
    two = comparing.link(run, shown.uid, against=run, chosen=chosen)
    both.page_link(comparing.PAGE, label="Compare both runs", icon=":material/compare:", query_params=two)
    outcome(shown)
    if len(found) > 1:
        with st.expander(f"All {len(found)} tries on this run"):
            st.dataframe(pd.DataFrame([_row(one) for one in found]), hide_index=True, width="stretch")


def outcome_shown(found: list[WhatIf]) -> WhatIf:
    """Of what was tried, the one in the URL (?whatif=), else the newest."""
    asked = st.query_params.get("whatif")
    return next((one for one in found if one.uid == asked), found[0])


def outcome(one: WhatIf) -> None:
    """Answer and divergence before and after, and what holding it would have cost."""
    said = one.summary
    if said is None:
        st.caption("This repeat did not come to an end, so nothing is known of its outcome.")
        return
    answer, numbers = st.columns([5, 6], gap="large")
    answer.text(
        f"Answer before: {_line(said.answer_before)}\nAnswer with it held: {_line(said.answer_after)}\n"
        f"Expected: {_line(said.expected)}"
    )
    step = said.step
    facts = (
        ("Answer restored", _RESTORED[said.restored]),
        (f"KL at step {step}, nats" if step is not None else "KL", f"{_nats(said.kl_before)} → {_nats(said.kl_after)}"),
        ("It would have cost", si_bytes(said.held_bytes)),
    )
    for column, (label, value) in zip(numbers.columns(3), facts, strict=True):
        column.metric(label, value)
    numbers.caption(plain(_cost(one)))
    if (search := said.search) is not None:
        names = ", ".join(f"L{layer} KV{head}" for layer, head in search.heads)
        found = (
            f"Smallest set found: {names}"
            if names
            else "Not even holding it for all of these heads brings the answer back"
        )
        st.markdown(plain(f"{found} ({search.tried} repeats)."))


def held_words(one: WhatIf) -> str:
    """'span 12 (tokens 300-331) held for L0 KV1, L1 KV0 from step 3 on'."""
    spans = ", ".join(
        f"span {hold.span} (tokens {hold.tok_start}–{hold.tok_end - 1})"
        if hold.whole
        else f"tokens {hold.tok_start}–{hold.tok_end - 1} of span {hold.span}"
        for hold in one.holds
    )
    heads = one.heads
    whole = len(heads) == one.all_heads and len(heads) > 1
    names = f"all {len(heads)} KV heads" if whole else ", ".join(f"L{layer} KV{head}" for layer, head in heads[:6])
    more = f" and {len(heads) - 6} more KV heads" if len(heads) > 6 and not whole else ""
    return f"{spans} held exactly resident for {names}{more} from step {one.from_step} on"


def _cost(one: WhatIf) -> str:
    """What the held bytes are a share of."""
    said = one.summary
    if said is None or (held := said.held_bytes) is None:
        return "Its bytes were not recorded."
    parts = [f"{said.held_tokens} tokens in {len(one.heads)} KV head{'s' if len(one.heads) > 1 else ''}"]
    if one.full_kv_bytes:
        parts.append(f"{held / one.full_kv_bytes:.2%} of full KV")
    if one.budget_bytes:
        parts.append(f"{held / one.budget_bytes:.1%} on top of the budget")
    return " · ".join(parts)


def _row(one: WhatIf) -> dict[str, Any]:
    said = one.summary or Counterfactual()
    return {
        "spans": ", ".join(map(str, one.spans)),
        "KV heads": len(one.heads),
        "from step": one.from_step,
        "restored": _RESTORED[said.restored],
        "KL before (nats)": said.kl_before,
        "KL after (nats)": said.kl_after,
        "answer": _line(said.answer_after),
        "held": si_bytes(said.held_bytes),
        "run": one.uid,
    }


def _line(text: object) -> str:
    return "not recorded" if text is None else " ".join(visible(text).split()) or "nothing"


def _nats(value: float | None) -> str:
    if value is None:
        return "not recorded"
    return "< 0.001" if 0 < value < 0.001 else f"{value:.3g}"
