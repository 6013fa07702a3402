"""What if it had been there, or had not been: what to hold, what to drop, and at which budget; one click on the run's
own suggestion, or lists that clicks put together."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from kvlens import methods
from kvlens.app.ui.common import lensjobs, sentences, session
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.request import TryChoice
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.common.widgets import label as field_label
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.replay import draft, tour
from kvlens.app.ui.replay.awaited import are_awaited
from kvlens.app.ui.replay.draft import Draft
from kvlens.app.ui.replay.leastsearches import offer_searches, packs_numbers
from kvlens.app.ui.replay.lenschoices import choices_of
from kvlens.app.ui.replay.triable import refusal
from kvlens.app.ui.replay.trial_outcome import at_the_button, shown_of
from kvlens.lens.answers import right
from kvlens.lens.knob import Knob, knob_in
from kvlens.lens.pieces import Piece
from kvlens.lens.tries import Try
from kvlens.lens.verdict import Verdict

Pieces = tuple[Piece, ...]
HELD = {"hold": "held", "drop": "dropped"}


def form(reader: TraceReader, selection: Selection, verdict: Verdict | None, busy: bool, outcomes: list[Try]) -> None:
    """The selected span (else the one of the verdict) or more, for which heads and from which step; what is on the
    lists instead, if something is; another budget. A run that lost is asked what brings its answer back, so the
    suggestion is held; one with nothing to bring back what its answer hangs on, so it is dropped; of another nothing is
    suggested. verdict: None of a run that never left full KV, or was not compared. `outcomes`: of what was tried
    before."""
    if reader.meta.imported is not None:
        engine = plain(reader.meta.imported.engine or "another engine")
        st.caption(f"{engine} carried out this run, so kvlens cannot repeat it with spans held or dropped.")
        return
    if reader.meta.observed is not None:
        st.caption(sentences.OBSERVED_HOLD)
        return
    knob = _knob(reader, reader.uid, reader.stamp)
    _inside_the_run(reader)
    current_draft = _possible(draft.current(reader.uid), knob)
    hangs = verdict is None and _nothing_to_bring_back(reader)
    offered, step = _offered(reader, selection, verdict, hangs, current_draft)
    at_the_button(outcomes, reader.meta)
    with st.container(horizontal=True, vertical_alignment="center"):
        default_spans = () if current_draft.listed or current_draft.share else offered
        holds, drops = default_spans if verdict is not None else (), default_spans if hangs else ()
        choice = TryChoice(
            current_draft.pieces or holds, step, _changed(knob, current_draft), drops=current_draft.drops or drops
        )
        with st.container(key=tour.HOLD, width="content"):
            nothing = not choice.pieces and not choice.drops and not choice.changed
            named = None if verdict is None or verdict.missed is None or are_awaited(reader) else verdict.missed.span
            label, means = _label(choice, current_draft, knob, named), _means(choice, current_draft, knob)
            if nothing and verdict is None and not hangs:
                label, means = "Run the list", "Add a span to the list first."
            icon = ":material/push_pin:" if choice.pieces or not choice.drops else ":material/visibility_off:"
            why_not = refusal(reader, current_draft.pieces, current_draft.drops, step)
            off = busy or nothing or bool(why_not)
            run = st.button(label, type="primary", icon=icon, disabled=off, help=plain(why_not) or means)
        _listing(current_draft, offered)
    search = ""
    with st.container(horizontal=True, vertical_alignment="center"):
        if verdict is not None:
            search = offer_searches(busy or bool(why_not), choice, bool(offered), packs_numbers(reader))
            shown = shown_of(outcomes)
            tour.tour(reader, verdict, None if shown is None or shown.drops else shown.summary)
        _budget(knob, current_draft)
    _chips(current_draft)
    if why_not:
        st.caption(plain(why_not[:1].upper() + why_not[1:]))
    if run or search:
        if search == "heads" and not choice.pieces:
            choice = replace(choice, pieces=offered)
        elif search == "bytes":
            choice = replace(choice, pieces=())
        elif search == "bits":
            choice = replace(choice, pieces=(), changed=(), from_step=0)
        st.query_params["job"] = lensjobs.start_whatif(reader.uid, replace(choice, search=search))
        st.rerun()


def _nothing_to_bring_back(reader: TraceReader) -> bool:
    """Of a run in which no step of loss is known: its answer is right, or, where none is known, it never left full
    KV."""
    answer, meta = right(reader), reader.meta
    if answer is not None:
        return answer
    return len(reader.loss()) > 0 or (meta.method == methods.REFERENCE and not meta.interfered)


def _offered(
    reader: TraceReader, selection: Selection, verdict: Verdict | None, hangs: bool, current_draft: Draft
) -> tuple[Pieces, int]:
    """(what the boxes say, for the heads they say; from which step). () where no span is selected or was missed."""
    missed = None if verdict is None else verdict.missed
    span = selection.span if selection.span is not None else (missed.span if missed is not None else None)
    choices: dict[str, Pieces] = {} if span is None and verdict is not None else choices_of(reader, span, verdict)
    asks = "Drop a span" if hangs else "Hold or drop a span" if verdict is None else "Hold a span"
    first_step = 0 if verdict is None else verdict.step
    if not choices:
        st.markdown(f"**{asks}** Click a token of a span to choose it.")
    layer, head = selection.layer or 0, (selection.head or 0) // (reader.q_heads // reader.kv_heads)
    places = {
        "all KV heads": (None, None),
        f"those of layer {layer}": (layer, None),
        f"L{layer} KV{head}": (layer, head),
    }
    first_column, second, third = st.columns([5, 4, 3])
    key = f"hold_from_{reader.uid}"
    session.follow(
        key, min(reader.n_steps - 1, first_step if current_draft.from_step is None else current_draft.from_step)
    )

    def moved() -> None:
        step = int(st.session_state[key])
        draft.change(replace(draft.current(reader.uid), from_step=None if step == first_step else step))

    start = third.number_input("from step", 0, reader.n_steps - 1, key=key, on_change=moved)
    if not choices:
        return (), int(start)
    key = f"hold_what_{reader.uid}_{span}"
    choice = first_column.selectbox(asks, list(choices), key=key, persist_state="session")
    if any(piece.layer is not None for piece in choices[str(choice)]):
        second.selectbox(
            "for", ["its KV head"], disabled=True, help="Each span is held for the KV head that missed it."
        )
        return choices[str(choice)], int(start)
    where = second.selectbox("for", list(places), key=f"hold_for_{reader.uid}_{layer}_{head}", persist_state="session")
    at_layer, at_head = places[str(where)]
    return tuple(replace(piece, layer=at_layer, kv_head=at_head) for piece in choices[str(choice)]), int(start)


def _label(choice: TryChoice, current_draft: Draft, knob: Knob | None, named: int | None) -> str:
    """What the button will do. named: the span that the verdict names for good; None: effects may still change it."""
    suffix = "" if knob is None or current_draft.share is None else f" at {knob.describe(current_draft.share)}"
    if current_draft.listed:
        verbs = (["hold"] if current_draft.pieces else []) + (["drop"] if current_draft.drops else [])
        return f"{' and '.join(verbs).capitalize()} the list{suffix}"
    if suffix:
        return f"Run it{suffix}"
    if len(choice.pieces) == 1 and choice.pieces[0].span not in (None, named):
        return f"Hold span {choice.pieces[0].span}"
    return "Drop it" if choice.drops else "Hold it resident"


def _means(choice: TryChoice, current_draft: Draft, knob: Knob | None) -> str:
    """The same in a sentence."""
    phrases = ["with the exact keys and values of these tokens on the device"] if choice.pieces else []
    if choice.drops:
        label = "those listed to drop" if choice.pieces else "these tokens"
        phrases.append(f"without attending {label}, which stay stored")
    phrases += [] if knob is None or current_draft.share is None else [f"at {knob.describe(current_draft.share)}"]
    return f"Repeats the run {', '.join(phrases)}, all else the same."


def _inside_the_run(reader: TraceReader) -> None:
    """Forgets a first step that the run does not have: a link may say any, and the address says what the box says."""
    current_draft = draft.current(reader.uid)
    if current_draft.from_step is not None and current_draft.from_step >= reader.n_steps:
        draft.change(replace(current_draft, from_step=None))


def _possible(current_draft: Draft, knob: Knob | None) -> Draft:
    """Without a share that the slider does not have, or the run's own: a link may say any."""
    is_other_share = knob is not None and current_draft.share in knob.shares and current_draft.share != knob.own
    return current_draft if is_other_share else replace(current_draft, share=None)


def _changed(knob: Knob | None, current_draft: Draft) -> tuple[tuple[str, str], ...]:
    return () if knob is None or current_draft.share is None else ((knob.name, knob.value(current_draft.share)),)


def _listing(current_draft: Draft, offered: Pieces) -> None:
    """Puts what the boxes say on one of the lists, or takes it off."""
    for verb, pieces in (("hold", current_draft.pieces), ("drop", current_draft.drops)):
        listed = bool(offered) and set(offered) <= set(pieces)
        next_draft = current_draft.toggled(offered, verb)
        full = next_draft.listed > draft.MOST
        st.button(
            "Unlist it" if listed else f"List it to {verb}",
            icon=":material/playlist_remove:" if listed else ":material/playlist_add:",
            key=f"list_to_{verb}",
            disabled=full or not offered,
            on_click=draft.change,
            args=(next_draft,),
            help=f"The list has room for {draft.MOST} pieces."
            if full
            else f"Adds this span to the list. One repeat then has all listed spans {HELD[verb]}.",
        )


def _budget(knob: Knob | None, current_draft: Draft) -> None:
    """The shares that the method can keep to, dragged."""
    if knob is None or len(knob.shares) < 2:
        return
    key, run = f"share_{current_draft.run}", current_draft.run
    session.follow(key, knob.own if current_draft.share is None else current_draft.share)

    def moved() -> None:
        share = float(st.session_state[key])
        draft.change(replace(draft.current(run), share=None if share == knob.own else share))

    st.markdown("at the budget" if knob.name == "budget" else f"with `{knob.name}`", width="content")
    st.select_slider(
        "Budget", knob.shares, key=key, format_func=knob.choice, on_change=moved, label_visibility="collapsed"
    )


def _chips(current_draft: Draft) -> None:
    """What is listed; a click takes it off."""
    if not current_draft.listed:
        return
    with st.container(horizontal=True, key="chips"):
        for verb, pieces in (("hold", current_draft.pieces), ("drop", current_draft.drops)):
            for piece in pieces:
                st.button(
                    field_label(f"{verb} {piece.describe_tokens()} · {piece.describe_heads()}"),
                    icon=":material/close:",
                    key=f"chip_{verb}_{piece}",
                    on_click=draft.change,
                    args=(current_draft.toggled((piece,), verb),),
                    help="Remove from the list",
                )
        if current_draft.listed > 1:
            none = replace(current_draft, pieces=(), drops=())
            st.button("Clear", key="chips_clear", type="tertiary", on_click=draft.change, args=(none,))


@st.cache_data(max_entries=64, show_spinner=False)
def _knob(_reader: TraceReader, uid: str, changed: int) -> Knob | None:
    return knob_in(_reader)
