"""The verdict on a run: where it lost against full KV, what was missed there, why, and what moved. Recorded columns, or
'not recorded'."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens import methods
from kvlens.app.ui.common import comparing, data, lensdata, lensjobs, places, sentences
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.spantext import span_text
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.replay import awaited, lenswhatif, tour, trial_outcome
from kvlens.app.ui.replay.lensbars import token_range
from kvlens.app.ui.replay.tipping import tipping_point
from kvlens.lens.answers import answer_sentence
from kvlens.lens.knob import knob_in
from kvlens.lens.lines import mass_name
from kvlens.lens.severity import severity, unmissed_words
from kvlens.lens.trylist import try_of
from kvlens.lens.verdict import Missed, Verdict, steps_in_words
from kvlens.meta import RunMeta
from kvlens.player.lens import diverged, sampling
from kvlens.player.payload import needle_tokens
from kvlens.store.amend import PENDING, why_none
from kvlens.store.cells import row_of_largest
from kvlens.store.errors import TraceError
from kvlens.text.units import counted, si_bytes

MOST_EFFECTS = 5
"""of what the choice hung on, named in words"""


def banner(reader: TraceReader) -> None:
    """On top of a what-if's own replay: what was held or dropped, and of which run it is a repeat."""
    attempt, parent = try_of(reader.meta, reader.uid), reader.meta.parent
    if attempt is None:
        return
    repeated = _meta(parent)
    if repeated is not None:
        attempt = attempt.beyond(repeated)
        if attempt.nothing and attempt.summary is None:
            return  # what it holds and drops is that run's own
    kind = "a hold" if attempt.holds else "a drop" if attempt.drops else "another setting"
    kind = "a hold and a drop" if attempt.mixed else kind
    with st.container(border=True):
        st.markdown(f"**Repeat with {kind}:** {plain(attempt.words())}. All else equals the run it repeats.")
        trial_outcome.outcome(attempt, repeated)
        if parent:
            place = places.in_run(str(parent))
            st.page_link(
                "pages/replay.py", label="Back to the run it repeats", icon=":material/undo:", query_params=place
            )


def _meta(uid: str | None) -> RunMeta | None:
    """Of a stored run; None where it is not there or cannot be read."""
    try:
        return data.open_run(uid).meta if uid else None
    except TraceError:
        return None


def panel(reader: TraceReader, selection: Selection) -> None:
    """The verdict and, beside it, what can be tried with the last outcome; below them a running repeat."""
    table = data.runs_lately()
    loss = data.loss_verdict(reader)
    job = lensjobs.job_of(reader.uid)
    outcomes = lensdata.tries(reader.uid, table)
    with st.container(border=True, key=tour.VERDICT):
        left_column, right = st.columns([7, 5], gap="large")
        with left_column:
            if loss is None:
                _without_loss(reader, table, busy=job is not None)
            else:
                st.markdown("  \n".join(lines(reader, loss)))
                awaited.effects_line(reader)
        with right:
            lenswhatif.form(reader, selection, loss, job is not None, outcomes)
        if job is not None:
            lensjobs.follow(job)


def below(reader: TraceReader, selection: Selection) -> None:
    """What the panel leaves out, for below the player: where the answer tips, what was tried before, and more of the
    loss."""
    table = data.runs_lately()
    loss = data.loss_verdict(reader)
    outcomes = lensdata.tries(reader.uid, table)
    steered = reader.meta.is_steered and reader.meta.method != methods.REFERENCE
    if steered and knob_in(reader) is not None:
        tipping_point(reader, outcomes, lensjobs.job_of(reader.uid) is not None)
    if outcomes:
        with st.container(border=True, key=tour.TRIED):
            trial_outcome.draw_trials(reader, outcomes, selection)
    if loss is not None:
        with st.expander("More of this loss"):
            st.markdown("\n\n".join(more(reader, loss)))
            _contexts(reader, table, busy=lensjobs.job_of(reader.uid) is not None)


def lines(reader: TraceReader, loss: Verdict) -> list[str]:
    """The verdict as lines of Markdown; text of tokens is escaped."""
    how = severity(reader, loss)
    means = f" · {plain(how.sentence())}" if how.sentence() else ""
    sentences = [
        f"**{how.headline(loss.step)}**: full KV says {quoted(loss.expected)}, this run {quoted(loss.got)}{means} · "
        f"{plain(loss.loss_words())}"
    ]
    missed = loss.missed
    if missed is None:
        words = unmissed_words(loss, how)
        sentence = plain(f"{words[0].upper()}{words[1:]}.") if loss.nothing_missed else ""
        sentences.append(sentence or f"**Missed most**: not recorded at this step{plain(sampling(reader))}.")
        return sentences
    group = reader.q_heads // reader.kv_heads
    effect = f" · {plain(missed.effect_words())}" if missed.effect_words() else ""
    heads = f"(mean over its {group} query heads, Q{missed.q_head} most)" if group > 1 else f"(Q{missed.q_head})"
    sentences.append(
        f"**Missed most** by L{missed.layer} KV{missed.kv_head} {plain(heads)}: {plain(_span(reader, missed))} "
        f"· {plain(missed.mass_words() + missed.regret_words())}{effect}"
    )
    why = f"**Why it was missed**: {plain(missed.reason.says)}."
    return [*sentences, why]


def more(reader: TraceReader, loss: Verdict) -> list[str]:
    """What the verdict's lines leave out: what else the choice hung on, what regret by span hides, and what moved."""
    return [*_effects(reader, loss), *_inside(reader, loss), _moved(loss)]


def _effects(reader: TraceReader, loss: Verdict) -> list[str]:
    """The triples that come first by effect on the lost choices, over which steps they are added and how long they took
    to find, or why there are none; nothing of a trace that never had them, or whose effects are on their way."""
    effects = reader.effects(loss.step)
    if effects.empty:
        why = why_none(data.runs_dir() / reader.uid, reader.meta.no_effects)
        return [] if why in (None, PENDING) else [f"**Effects**: not recorded, {plain(str(why))}."]
    strongest = effects.head(MOST_EFFECTS)
    named = " · ".join(
        f"L{layer} KV{head} span {span} {effect:.2f}"
        for layer, head, span, effect in strongest[["layer", "kv_head", "span", "effect"]].itertuples(index=False)
    )
    steps, lead = reader.meta.effect_steps, effects["lead"].iloc[0]
    leads = f"Under full KV the lead is {lead:.2f} logits."
    took = "" if reader.meta.effect_s is None else f" Found in {reader.meta.effect_s:.1f} s after the run."
    return [f"**Effects**, logits, {steps_in_words(steps)}: {plain(f'{named}. {leads}{took}')}"]


def _inside(reader: TraceReader, loss: Verdict) -> list[str]:
    """The tokens that regret by span hides, where there are some."""
    if (line := loss.lost_inside) is None:
        return []
    tokens = reader.tokens()
    text = " … ".join(span_text(tokens, start, end, 70).strip() for start, end in line.tokens)
    name = mass_name(reader.has_reference_masses())
    return [
        f"**{plain(line.words().capitalize())}** for L{line.layer} KV{line.kv_head}, “{plain(text)}”: {plain(name)} on "
        f"the span's unread tokens is **{plain(f'{line.share:.2f}')}** more than the span's regret shows. The head "
        "gave other tokens of the span more than full attention does."
    ]


def _span(reader: TraceReader, missed: Missed) -> str:
    tokens = reader.tokens()
    if missed.kind == "window":
        return f"span {missed.span}, the window"
    start, end = missed.tok_start, missed.tok_end
    needle = needle_tokens(tokens, reader.meta.needle)
    star = ", part of the needle" if any(a < end and b > start for a, b in needle) else ""
    return f"span {missed.span}, {token_range(start, end)}{star}, “{span_text(tokens, start, end, 70).strip()}”"


def _moved(loss: Verdict) -> str:
    text = f"**Moved to the device** at step {loss.step}: {plain(si_bytes(loss.h2d_bytes))}"
    if loss.missed is not None and loss.h2d_bytes:
        least = "at least " if loss.unnamed_bytes else ""
        text += f", of which span {loss.missed.span}, over all heads: {least}{plain(si_bytes(loss.missed.h2d_bytes))}"
    return text + "."


def quoted(token: str) -> str:
    """A token in quotation marks, blanks visible, safe in Markdown."""
    shown = token.replace("\n", "⏎")
    blank = "·" * len(shown)
    return f"“{plain(shown) if shown.strip() else blank}”"


def _without_loss(reader: TraceReader, table: pd.DataFrame, busy: bool) -> None:
    loss = reader.loss()
    if len(loss):
        worst = row_of_largest(loss, "kl")
        most = "No KL was recorded."
        if worst is not None:
            nats = plain(f"{float(worst['kl']):.3g}")
            most = f"The largest KL is {nats} nats, at step {int(worst['step'])}."
        st.markdown(
            f"**Nothing was lost**: at all {len(loss)} compared steps this run's most probable token is full KV's. "
            f"{most}{answer_sentence(reader.meta)}"
        )
        _contexts(reader, table, busy)
    elif reader.meta.method == "full":
        pairs = int((table["reference"] == reader.uid).sum())
        references = f"It is the reference of {counted(pairs, 'other run')}." if pairs else ""
        st.markdown(f"**This run is full KV itself.** {references}{answer_sentence(reader.meta)}")
    elif reader.meta.imported is not None:
        st.markdown("**What this run lost against full KV was not recorded** in the trace.")
    else:
        st.markdown(sentences.LOSS_NOT_RECORDED)
        _compare(reader, table, busy, "Compare with full KV")


def _contexts(reader: TraceReader, table: pd.DataFrame, busy: bool) -> None:
    """A free run goes its own way after its first other token; the page says so and offers the forced comparison."""
    last = diverged(reader)
    if last is None:
        if reader.meta.forced:
            st.caption("Forced: this run was fed full KV's tokens, so its contexts are full KV's at every step.")
        return
    st.caption(
        f"Steps from {last + 1} on are not compared: this run continued with its own token, so its context differs."
    )
    _compare(reader, table, busy, sentences.COMPARE_ALL_STEPS)


def _compare(reader: TraceReader, table: pd.DataFrame, busy: bool, label: str) -> None:
    """The way to the forced comparison: to the one there is, else to a job that makes it."""
    if (repeat_uid := lensdata.forced_repeat(reader.uid, table)) is not None:
        st.page_link(
            comparing.PAGE,
            label="Add all steps to the comparison",
            icon=":material/compare_arrows:",
            query_params=comparing.at_all_steps(reader.uid, repeat_uid),
            help="This run, full KV, and its repeat on full KV's tokens, beside each other.",
        )
    elif st.button(
        label, icon=":material/compare_arrows:", disabled=busy, help="Makes a second run that is fed full KV's tokens."
    ):
        st.query_params["job"] = lensjobs.start_pair(reader.uid)
        st.rerun()
