"""What if it had been there: what to hold, and at which budget; one click on the run's own suggestion, or a list that
clicks put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import streamlit as st

from kvlens.lens.knob import Knob, knob_of
from kvlens.lens.lines import inside, joined, ranges_in_words, ranked
from kvlens.lens.pieces import Piece
from kvlens.lens.tries import Try
from kvlens.lens.verdict import Verdict
from kvlens.ui.common import data, lensjobs, session
from kvlens.ui.common.data import TraceReader
from kvlens.ui.common.player.payload import needle_tokens
from kvlens.ui.common.request import TryChoice
from kvlens.ui.common.state import Selection
from kvlens.ui.common.widgets import plain
from kvlens.ui.replay import draft, tour
from kvlens.ui.replay.draft import Draft
from kvlens.ui.replay.tried import shown_of

Pieces = tuple[Piece, ...]


def form(reader: TraceReader, chosen: Selection, found: Verdict, busy: bool, outcomes: list[Try]) -> None:
    """The selected span (else the one of the verdict) or more, for which heads and from which step; what is on the list
    instead, if something is; another budget. `outcomes`: of what was tried before."""
    knob = _knob(reader, reader.uid, data.stamp(reader.uid))
    made = _possible(draft.current(reader.uid), knob)
    offered, step = _offered(reader, chosen, found, made)
    with st.container(horizontal=True, vertical_alignment="center"):
        wanted = TryChoice(made.pieces or (() if made.share else offered), step, _changed(knob, made))
        with st.container(key=tour.HOLD, width="content"):
            nothing = not wanted.pieces and not wanted.changed
            label, means = _label(made, knob), _means(made, knob)
            hold = st.button(label, type="primary", icon=":material/push_pin:", disabled=busy or nothing, help=means)
        _listing(made, offered)
        search = _searches(busy, wanted, bool(offered))
        tour.tour(reader, found, None if (shown := shown_of(outcomes)) is None else shown.summary)
    _budget(knob, made)
    _chips(made)
    if hold or search:
        if search == "heads" and not wanted.pieces:
            wanted = replace(wanted, pieces=offered)
        elif search == "bytes":
            wanted = replace(wanted, pieces=())
        st.query_params["job"] = lensjobs.start_whatif(reader.uid, replace(wanted, search=search))
        st.rerun()


def _offered(reader: TraceReader, chosen: Selection, found: Verdict, made: Draft) -> tuple[Pieces, int]:
    """(what the boxes say, for the heads they say; from which step). () where no span is selected or was missed."""
    missed = found.missed
    span = chosen.span if chosen.span is not None else (missed.span if missed is not None else None)
    choices: dict[str, Pieces] = {} if span is None else spans_to_hold(reader, span, found)
    if not choices:
        st.markdown("**What if it had been there?** Click a token of a span to choose it.")
    layer, head = chosen.layer or 0, (chosen.head or 0) // (reader.q_heads // reader.kv_heads)
    places = {
        "all KV heads": (None, None),
        f"those of layer {layer}": (layer, None),
        f"L{layer} KV{head}": (layer, head),
    }
    first, second, third = st.columns([5, 4, 3])
    key = f"hold_from_{reader.uid}"
    session.follow(key, min(reader.n_steps - 1, found.step if made.from_step is None else made.from_step))

    def moved() -> None:
        step = int(st.session_state[key])
        draft.change(replace(draft.current(reader.uid), from_step=None if step == found.step else step))

    start = third.number_input("from step", 0, reader.n_steps - 1, key=key, on_change=moved)
    if not choices:
        return (), int(start)
    what = first.selectbox(
        "What if it had been there? Hold", list(choices), key=f"hold_what_{reader.uid}_{span}", persist_state="session"
    )
    where = second.selectbox("for", list(places), key=f"hold_for_{reader.uid}_{layer}_{head}", persist_state="session")
    at_layer, at_head = places[str(where)]
    return tuple(replace(piece, layer=at_layer, kv_head=at_head) for piece in choices[str(what)]), int(start)


def _label(made: Draft, knob: Knob | None) -> str:
    """What the button will do."""
    at = "" if knob is None or made.share is None else f" at {_share(knob, made.share)}"
    if made.pieces:
        return f"Hold the list{at}"
    return f"Run it{at}" if at else "Hold it resident"


def _means(made: Draft, knob: Knob | None) -> str:
    """The same in a sentence."""
    said = [] if made.share and not made.pieces else ["with the exact keys and values of these tokens on the device"]
    said += [] if knob is None or made.share is None else [f"at {_share(knob, made.share)}"]
    return f"Repeats the run {', '.join(said)}, all else the same."


def _possible(made: Draft, knob: Knob | None) -> Draft:
    """Without a share that the slider does not have, or the run's own: a link may say any."""
    other = knob is not None and made.share in knob.shares and made.share != knob.own
    return made if other else replace(made, share=None)


def _changed(knob: Knob | None, made: Draft) -> tuple[tuple[str, str], ...]:
    return () if knob is None or made.share is None else ((knob.name, knob.value(made.share)),)


def _listing(made: Draft, offered: Pieces) -> None:
    """Puts what the boxes say on the list, or takes it off."""
    there = bool(offered) and set(offered) <= set(made.pieces)
    after = made.toggled(offered)
    full = len(after.pieces) > draft.MOST
    st.button(
        "Unlist it" if there else "List it",
        icon=":material/playlist_remove:" if there else ":material/playlist_add:",
        key="list_toggle",
        disabled=full or not offered,
        on_click=draft.change,
        args=(after,),
        help=f"The list has room for {draft.MOST} pieces."
        if full
        else "Click spans in the text or the map and list them: all that is listed is held together.",
    )


def _searches(busy: bool, wanted: TryChoice, offered: bool) -> str:
    """'heads' or 'bytes' where such a search is asked for."""
    with st.popover("Find the least", icon=":material/search:", disabled=busy, key=f"least_{busy}"):
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

    name, slider = st.columns([3, 9], vertical_alignment="center")
    name.markdown("at the budget" if knob.name == "budget" else f"with `{knob.name}`")
    slider.select_slider(
        "Budget",
        knob.shares,
        key=key,
        format_func=lambda share: _share(knob, share) + (" (as it was)" if share == knob.own else ""),
        on_change=moved,
        label_visibility="collapsed",
    )


def _share(knob: Knob, share: float) -> str:
    return f"{share:g}%" if knob.name == "budget" else f"{knob.name} {share:g}%"


def _chips(made: Draft) -> None:
    """What is listed; a click takes it off."""
    if not made.pieces:
        return
    with st.container(horizontal=True, key="chips"):
        for piece in made.pieces:
            st.button(
                plain(f"{piece.what()} · {piece.whose()}"),
                icon=":material/close:",
                key=f"chip_{piece}",
                on_click=draft.change,
                args=(made.toggled((piece,)),),
                help="Take it off the list",
            )
        if len(made.pieces) > 1:
            st.button(
                "Clear", key="chips_clear", type="tertiary", on_click=draft.change, args=(replace(made, pieces=()),)
            )


@st.cache_data(max_entries=64, show_spinner=False)
def _knob(_reader: TraceReader, uid: str, changed: int) -> Knob | None:
    return knob_of(_reader.meta)


def spans_to_hold(reader: TraceReader, span: int, found: Verdict) -> dict[str, tuple[Piece, ...]]:
    """What may be held, in words: the span, the tokens lost inside it, the needle's spans where more than one holds it,
    the five lines missed most at the step of loss, spans and tokens lost inside spans."""
    choices: dict[str, tuple[Piece, ...]] = {}
    spans = reader.spans()
    if span not in set(spans.loc[spans["kind"] == "window", "span"]):
        choices[f"span {span}"] = (Piece(span),)
    lost = inside(reader, found.step)
    for line in lost:
        if line.span == span or line is lost[0]:
            choices[line.words()] = _pieces(tokens=line.tokens)
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
        choices[f"the needle: {len(inner)} span{'s' if len(inner) > 1 else ''}"] = _pieces(inner)
    most, tokens = _most_missed(reader, found.step)
    if len(most) + len(tokens) > 1:
        what = f"the {len(most)} spans missed most"
        choices[what + (f" and {ranges_in_words(tokens)}" if tokens else "")] = _pieces(most, tokens)
    return choices


def _most_missed(reader: TraceReader, step: int, most: int = 5) -> tuple[list[int], tuple[tuple[int, int], ...]]:
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
    return list(spans), tokens


def _pieces(spans: Iterable[int] = (), tokens: Iterable[tuple[int, int]] = ()) -> tuple[Piece, ...]:
    return (*(Piece(span) for span in spans), *(Piece(tokens=there) for there in tokens))
