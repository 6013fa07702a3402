"""What was tried on a run: the outcome of one try, the list of all, going back, taking one away."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.figures.fewest import BITS_COLUMNS, COLUMNS, fewest_bytes
from kvlens.app.ui.common import comparing, data, places
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.lensdata import NONE
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.common.widgets import error, plain
from kvlens.app.ui.replay import draft, tour
from kvlens.app.ui.replay.draft import Draft
from kvlens.app.ui.replay.trydetails import line, made_of, more_bytes, nats_text
from kvlens.lens.fewest_bits import NAMED
from kvlens.lens.knob import knob_in
from kvlens.lens.search_words import describe_search
from kvlens.lens.tries import Try
from kvlens.meta import RunMeta
from kvlens.metaparts import Counterfactual, Search
from kvlens.store.errors import TraceError
from kvlens.store.recover import delete_run
from kvlens.text.plaintext import visible
from kvlens.text.units import counted, si_bytes

MOST_OF_ANSWER = 40
"""characters of an answer at the button"""


def draw_trials(reader: TraceReader, trials: list[Try], selection: Selection) -> None:
    """The outcome of the try that is looked at, the ways from it, and a list of all. `trials`: newest first."""
    shown = shown_of(trials)
    if shown is not None:
        summary_column, ways = st.columns([7, 5], vertical_alignment="center")
        summary_column.markdown(f"**Tried:** {plain(shown.words())}.")
        with ways.container(horizontal=True, horizontal_alignment="right", vertical_alignment="center"):
            replay = places.in_run(shown.uid, selection)
            st.page_link("pages/replay.py", label="Replay it", icon=":material/play_circle:", query_params=replay)
            two = comparing.link(reader.uid, shown.uid, against=reader.uid, selection=selection)
            st.page_link(comparing.PAGE, label="Compare both runs", icon=":material/compare:", query_params=two)
            st.button(
                "Undo",
                icon=":material/undo:",
                key="try_undo",
                type="tertiary",
                on_click=_undo,
                args=(reader, trials, shown),
                help="Back to the try before this one, with what was chosen for it. Nothing is deleted.",
            )
            _remove(trials, shown)
        outcome(shown, reader.meta)
    if len(trials) > 1 or shown is None:
        with st.expander(f"All tries on this run ({len(trials)})"):
            _list(reader, trials, shown)


def at_the_button(trials: list[Try], repeated: RunMeta) -> None:
    """The outcome of the try that is looked at, in one line above the button that repeats the run, cut where the line
    ends; `draw_trials` has the whole of it. Nothing without one."""
    shown = shown_of(trials)
    if shown is None or (summary := shown.summary) is None:
        return
    label, value = _came(shown, summary)
    parts = [
        f"answer {_clipped(summary.answer_before)} → {_clipped(summary.answer_after)}",
        f"KL {nats_text(summary.kl_before)} → {nats_text(summary.kl_after)} nats",
    ]
    if shown.holds and not shown.mixed and (more := shown.more_bytes(repeated.budget_bytes)) is not None:
        parts.append(si_bytes(more))
    parts.append(shown.brief())
    with st.container(key=tour.RESULT):
        st.markdown(f"**{plain(f'{label}: {value}')}** · {plain(' · '.join(parts))}")


def _clipped(answer: str | None) -> str:
    """An answer, cut where it is long."""
    text = line(answer)
    return text if len(text) <= MOST_OF_ANSWER else f"{text[:MOST_OF_ANSWER]}…"


def shown_of(trials: list[Try]) -> Try | None:
    """Of what was tried, the one in the URL (?whatif=), else the newest; None where nothing is, or none is wanted."""
    requested = st.query_params.get("whatif")
    if requested == NONE or not trials:
        return None
    return next((trial for trial in trials if trial.uid == requested), trials[0])


def _undo(reader: TraceReader, trials: list[Try], shown: Try) -> None:
    """The try before, and the list and budget it was made of; before the first one the run as it was recorded."""
    index = next((place for place, trial in enumerate(trials) if trial.uid == shown.uid), len(trials))
    earlier = trials[index + 1] if index + 1 < len(trials) else None
    if earlier is None:
        draft.go_back_to(Draft(reader.uid), NONE)
    else:
        draft.go_back_to(draft_of(reader, earlier), earlier.uid)


def draft_of(reader: TraceReader, trial: Try) -> Draft:
    """What was put together for a try, as far as the page can: its lists, its budget. A list that is too long for the
    page is cut."""
    pieces = trial.pieces[: draft.MOST]
    drops = trial.dropped_pieces[: draft.MOST - len(pieces)]
    knob = knob_in(reader)
    value = None if knob is None else trial.changed.get(knob.name)
    share = None if knob is None or value is None else knob.share(value)
    return Draft(reader.uid, pieces, trial.from_step if pieces or drops else None, share, drops)


def _remove(trials: list[Try], shown: Try) -> None:
    """The stored repeat goes for good, after a second click."""
    with st.popover("Remove", icon=":material/delete:", type="tertiary", key=f"remove_{shown.uid}"):
        st.markdown(f"Delete run {plain(shown.uid)}, which is this try? It cannot be brought back.")
        if st.button("Delete it", key=f"delete_{shown.uid}", type="primary"):
            try:
                delete_run(data.runs_dir(), shown.uid)
            except TraceError as problem:
                error(str(problem))
                return
            data.forget_runs()
            st.query_params["whatif"] = next((trial.uid for trial in trials if trial.uid != shown.uid), NONE)
            st.rerun()


def _list(reader: TraceReader, trials: list[Try], shown: Try | None) -> None:
    """A row per try, newest first; a selected one is shown above."""
    key = f"tries_{reader.uid}_{NONE if shown is None else shown.uid}_{len(trials)}"

    def select() -> None:
        rows = st.session_state[key]["selection"]["rows"]
        if rows and rows[0] < len(trials):
            st.query_params["whatif"] = trials[rows[0]].uid

    table = pd.DataFrame([_row(trial, trial is shown, reader.meta.budget_bytes) for trial in trials])
    columns = {
        "": st.column_config.TextColumn(width=30, help="The one that is shown above"),
        "tried": st.column_config.TextColumn(width="large"),
        "KL before (nats)": st.column_config.NumberColumn(format="%.3g"),
        "KL after (nats)": st.column_config.NumberColumn(format="%.3g"),
    }
    st.dataframe(
        table,
        hide_index=True,
        width="stretch",
        key=key,
        on_select=select,
        selection_mode="single-row",
        column_config=columns,
        height=min(300, 40 + 35 * len(table)),
    )


def _row(trial: Try, shown: bool, budget: int | None) -> dict[str, Any]:
    summary, more = trial.summary or Counterfactual(), trial.more_bytes(budget)
    return {
        "": "●" if shown else "",
        "tried": visible(trial.brief()) + (" (found by a search)" if summary.search is not None else ""),
        "answer": line(summary.answer_after),
        "restored, or stands": trial.outcome(),
        "KL before (nats)": summary.kl_before,
        "KL after (nats)": summary.kl_after,
        "bytes more": si_bytes(more),
        "run": trial.uid,
    }


def outcome(trial: Try, repeated: RunMeta | None) -> None:
    """Answer and divergence before and after, and the bytes that it held, or how much was left out. repeated: the run
    that was tried on; None where it cannot be read."""
    summary = trial.summary
    if summary is None:
        st.caption("This repeat did not finish, so its outcome is not known.")
        return
    answer, numbers = st.columns([5, 6], gap="large")
    how = "with it held" if trial.holds else f"at {visible(trial.otherwise())}"
    if trial.drops:
        how = "without it" if not trial.mixed else "with the hold and without the dropped span"
    answer.text(
        f"Answer before: {line(summary.answer_before)}\nAnswer {how}: {line(summary.answer_after)}\n"
        f"{'Expected' if summary.answer_known else 'Full KV'}: {line(summary.expected)}"
    )
    step = summary.step
    cost = (
        ("More bytes" if "budget" in trial.changed else "Bytes held", si_bytes(more_bytes(trial, repeated)))
        if trial.holds
        else ("Budget", si_bytes(trial.budget))
    )
    if summary.lifted_tokens and not summary.held_tokens and not trial.changed:
        cost = ("Drop lifted", si_bytes(0))
    if trial.drops and not trial.holds and not trial.changed:
        cost = ("Dropped", counted(summary.dropped_tokens or 0, "token"))
    if trial.mixed:
        cost = ("Held", si_bytes(summary.held_bytes))
    facts = (
        _came(trial, summary),
        (
            f"KL at step {step}, nats" if step is not None else "KL",
            f"{nats_text(summary.kl_before)} → {nats_text(summary.kl_after)}",
        ),
        cost,
    )
    for column, (label, value) in zip(numbers.columns(3), facts, strict=True):
        column.metric(label, value)
    if words := made_of(trial, repeated):
        numbers.caption(plain(f"{cost[0]}: {words[0].lower()}{words[1:]}"))
    if (search := summary.search) is not None:
        st.markdown(plain(describe_search(search)))
        if search.tests:
            with st.expander(f"{counted(len(search.tests), 'set')} tried: bytes against restored"):
                _every_set(trial, search)


def _came(trial: Try, counterfactual: Counterfactual) -> tuple[str, str]:
    """What came of it, as a figure with its label."""
    words = trial.outcome()
    if not counterfactual.answer_known:
        return "Compared with full KV", words.replace(" full KV", "")
    if trial.mixed:
        return "With the hold, without the drop", words.removeprefix("it is ").split(" with ")[0]
    return "The answer" if trial.drops else "Answer restored", words.removeprefix("it ")


def _every_set(trial: Try, search: Search) -> None:
    for_bits = search.finer is not None
    rows = [(n, test.size, test.held_bytes, test.kl, bool(test.restored)) for n, test in enumerate(search.tests, 1)]
    table = pd.DataFrame(rows, columns=list(BITS_COLUMNS if for_bits else COLUMNS))
    if for_bits:
        table["bits"] = [test.bits or "exact" for test in search.tests]
        table["bits"] = table["bits"].astype(str)
    chart(
        fewest_bytes(table, trial.full_kv_bytes),
        partial(table.copy),
        f"{trial.uid}-fewest-{'bits' if for_bits else 'bytes'}",
        f"fewest_{trial.uid}",
        f"{'Extra' if for_bits else 'Held'} bytes and KL of every set that the search tried",
    )
    if search.side_effects:
        effects = pd.DataFrame(search.side_effects, columns=["layer", "KV head", "K or V", "effect (logits)"])
        st.caption(
            "Lead lost because keys or values are stored in few bits, by gradients of full KV (logits). "
            f"The {NAMED} largest at most."
        )
        st.dataframe(effects, hide_index=True, key=f"side_effects_{trial.uid}")
