"""What if it had been there, or had not been: what to hold, what to drop, and at which budget; one click on the run's
own suggestion, or lists that clicks put together."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from kvlens import methods
from kvlens.app.ui.common import data, lensjobs, session
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.request import TryChoice
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.replay import draft, tour
from kvlens.app.ui.replay.draft import Draft
from kvlens.app.ui.replay.lenschoices import choices_of
from kvlens.app.ui.replay.triable import refusal
from kvlens.app.ui.replay.tried import shown_of
from kvlens.lens.knob import Knob, knob_in
from kvlens.lens.pieces import Piece
from kvlens.lens.severity import right
from kvlens.lens.tries import Try
from kvlens.lens.verdict import Verdict

Pieces = tuple[Piece, ...]
HELD = {"hold": "held", "drop": "dropped"}


def form(reader: TraceReader, chosen: Selection, found: Verdict | None, busy: bool, outcomes: list[Try]) -> None:
    """The selected span (else the one of the verdict) or more, for which heads and from which step; what is on the
    lists instead, if something is; another budget. A run that lost is asked what brings its answer back, so the
    suggestion is held; one with nothing to bring back what its answer hangs on, so it is dropped; of another nothing is
    suggested. found: None of a run that never left full KV, or was not compared. `outcomes`: of what was tried
    before."""
    knob = _knob(reader, reader.uid, data.stamp(reader.uid))
    _inside_the_run(reader)
    made = _possible(draft.current(reader.uid), knob)
    hangs = found is None and _nothing_to_bring_back(reader)
    offered, step = _offered(reader, chosen, found, hangs, made)
    with st.container(horizontal=True, vertical_alignment="center"):
        own = () if made.listed or made.share else offered
        holds, drops = own if found is not None else (), own if hangs else ()
        wanted = TryChoice(made.pieces or holds, step, _changed(knob, made), drops=made.drops or drops)
        with st.container(key=tour.HOLD, width="content"):
            nothing = not wanted.pieces and not wanted.drops and not wanted.changed
            label, means = _label(wanted, made, knob), _means(wanted, made, knob)
            if nothing and found is None and not hangs:
                label, means = "Run the list", "List first what is to be held or dropped."
            icon = ":material/push_pin:" if wanted.pieces or not wanted.drops else ":material/visibility_off:"
            why_not = refusal(reader, made.pieces, made.drops, step)
            off = busy or nothing or bool(why_not)
            run = st.button(label, type="primary", icon=icon, disabled=off, help=plain(why_not) or means)
        _listing(made, offered)
    search = ""
    with st.container(horizontal=True, vertical_alignment="center"):
        if found is not None:
            search = _searches(busy or bool(why_not), wanted, bool(offered))
            shown = shown_of(outcomes)
            tour.tour(reader, found, None if shown is None or shown.drops else shown.summary)
        _budget(knob, made)
    _chips(made)
    if why_not:
        st.caption(plain(why_not[:1].upper() + why_not[1:]))
    if run or search:
        if search == "heads" and not wanted.pieces:
            wanted = replace(wanted, pieces=offered)
        elif search == "bytes":
            wanted = replace(wanted, pieces=())
        st.query_params["job"] = lensjobs.start_whatif(reader.uid, replace(wanted, search=search))
        st.rerun()


def _nothing_to_bring_back(reader: TraceReader) -> bool:
    """Of a run in which no step of loss is known: its answer is right, or, where none is known, it never left full
    KV."""
    answer, meta = right(reader), reader.meta
    if answer is not None:
        return answer
    return len(reader.loss()) > 0 or (meta.method == methods.REFERENCE and not meta.interfered)


def _offered(
    reader: TraceReader, chosen: Selection, found: Verdict | None, hangs: bool, made: Draft
) -> tuple[Pieces, int]:
    """(what the boxes say, for the heads they say; from which step). () where no span is selected or was missed."""
    missed = None if found is None else found.missed
    span = chosen.span if chosen.span is not None else (missed.span if missed is not None else None)
    choices: dict[str, Pieces] = {} if span is None and found is not None else choices_of(reader, span, found)
    asks = "Had it not been there?" if hangs else "What if it had been there?"
    if found is None and not hangs:
        asks = "What if it had, or had not, been there?"
    first_step = 0 if found is None else found.step
    if not choices:
        st.markdown(f"**{asks}** Click a token of a span to choose it.")
    layer, head = chosen.layer or 0, (chosen.head or 0) // (reader.q_heads // reader.kv_heads)
    places = {
        "all KV heads": (None, None),
        f"those of layer {layer}": (layer, None),
        f"L{layer} KV{head}": (layer, head),
    }
    first, second, third = st.columns([5, 4, 3])
    key = f"hold_from_{reader.uid}"
    session.follow(key, min(reader.n_steps - 1, first_step if made.from_step is None else made.from_step))

    def moved() -> None:
        step = int(st.session_state[key])
        draft.change(replace(draft.current(reader.uid), from_step=None if step == first_step else step))

    start = third.number_input("from step", 0, reader.n_steps - 1, key=key, on_change=moved)
    if not choices:
        return (), int(start)
    key = f"hold_what_{reader.uid}_{span}"
    asks += " Drop" if hangs else " Hold" if found is not None else ""
    what = first.selectbox(asks, list(choices), key=key, persist_state="session")
    if any(piece.layer is not None for piece in choices[str(what)]):
        second.selectbox("for", ["its KV head"], disabled=True, help="Each for the KV head that missed it.")
        return choices[str(what)], int(start)
    where = second.selectbox("for", list(places), key=f"hold_for_{reader.uid}_{layer}_{head}", persist_state="session")
    at_layer, at_head = places[str(where)]
    return tuple(replace(piece, layer=at_layer, kv_head=at_head) for piece in choices[str(what)]), int(start)


def _label(wanted: TryChoice, made: Draft, knob: Knob | None) -> str:
    """What the button will do."""
    at = "" if knob is None or made.share is None else f" at {knob.said(made.share)}"
    if made.listed:
        verbs = (["hold"] if made.pieces else []) + (["drop"] if made.drops else [])
        return f"{' and '.join(verbs).capitalize()} the list{at}"
    if at:
        return f"Run it{at}"
    return "Drop it" if wanted.drops else "Hold it resident"


def _means(wanted: TryChoice, made: Draft, knob: Knob | None) -> str:
    """The same in a sentence."""
    said = ["with the exact keys and values of these tokens on the device"] if wanted.pieces else []
    if wanted.drops:
        what = "those listed to drop" if wanted.pieces else "these tokens"
        said.append(f"without attending {what}, which stay where they lie")
    said += [] if knob is None or made.share is None else [f"at {knob.said(made.share)}"]
    return f"Repeats the run {', '.join(said)}, all else the same."


def _inside_the_run(reader: TraceReader) -> None:
    """Forgets a first step that the run does not have: a link may say any, and the address says what the box says."""
    made = draft.current(reader.uid)
    if made.from_step is not None and made.from_step >= reader.n_steps:
        draft.change(replace(made, from_step=None))


def _possible(made: Draft, knob: Knob | None) -> Draft:
    """Without a share that the slider does not have, or the run's own: a link may say any."""
    other = knob is not None and made.share in knob.shares and made.share != knob.own
    return made if other else replace(made, share=None)


def _changed(knob: Knob | None, made: Draft) -> tuple[tuple[str, str], ...]:
    return () if knob is None or made.share is None else ((knob.name, knob.value(made.share)),)


def _listing(made: Draft, offered: Pieces) -> None:
    """Puts what the boxes say on one of the lists, or takes it off."""
    for verb, there in (("hold", made.pieces), ("drop", made.drops)):
        listed = bool(offered) and set(offered) <= set(there)
        after = made.toggled(offered, verb)
        full = after.listed > draft.MOST
        st.button(
            "Unlist it" if listed else f"List it to {verb}",
            icon=":material/playlist_remove:" if listed else ":material/playlist_add:",
            key=f"list_to_{verb}",
            disabled=full or not offered,
            on_click=draft.change,
            args=(after,),
            help=f"The list has room for {draft.MOST} pieces."
            if full
            else f"Click spans in the text or the map and list them: all that is listed is {HELD[verb]} together.",
        )


def _searches(busy: bool, wanted: TryChoice, offered: bool) -> str:
    """'heads' or 'bytes' where such a search is asked for."""
    off = busy or bool(wanted.drops)
    why = "A search looks for what to hold: take what is to be dropped off the list first." if wanted.drops else None
    with st.popover("Find the least", icon=":material/search:", disabled=off, key=f"least_{off}", help=why):
        heads = st.button(
            "Find the smallest set of heads",
            disabled=not (offered or wanted.pieces),
            width="stretch",
            help="Of what is to be held: repeats the run again and again with it held for some heads, until none "
            "can be left out.",
        )
        least = st.button(
            "Restore with the fewest bytes",
            width="stretch",
            help="Chooses by itself: spans for single KV heads, those missed most first; then leaves out what is not "
            "needed.",
        )
    return "heads" if heads else "bytes" if least else ""


def _budget(knob: Knob | None, made: Draft) -> None:
    """The shares that the method can keep to, dragged."""
    if knob is None or len(knob.shares) < 2:
        return
    key, run = f"share_{made.run}", made.run
    session.follow(key, knob.own if made.share is None else made.share)

    def moved() -> None:
        share = float(st.session_state[key])
        draft.change(replace(draft.current(run), share=None if share == knob.own else share))

    st.markdown("at the budget" if knob.name == "budget" else f"with `{knob.name}`", width="content")
    st.select_slider(
        "Budget", knob.shares, key=key, format_func=knob.choice, on_change=moved, label_visibility="collapsed"
    )


def _chips(made: Draft) -> None:
    """What is listed; a click takes it off."""
    if not made.listed:
        return
    with st.container(horizontal=True, key="chips"):
        for verb, pieces in (("hold", made.pieces), ("drop", made.drops)):
            for piece in pieces:
                st.button(
                    plain(f"{verb} {piece.what()} · {piece.whose()}"),
                    icon=":material/close:",
                    key=f"chip_{verb}_{piece}",
                    on_click=draft.change,
                    args=(made.toggled((piece,), verb),),
                    help="Take it off the list",
                )
        if made.listed > 1:
            none = replace(made, pieces=(), drops=())
            st.button("Clear", key="chips_clear", type="tertiary", on_click=draft.change, args=(none,))


@st.cache_data(max_entries=64, show_spinner=False)
def _knob(_reader: TraceReader, uid: str, changed: int) -> Knob | None:
    return knob_in(_reader)
