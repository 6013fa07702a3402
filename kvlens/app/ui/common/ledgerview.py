"""The loss ledger on pages: of one run, of several beside each other, of a study."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import streamlit as st

from kvlens.app.figures.ledger import ledger_bars
from kvlens.app.ui.common import data, jobview
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.job import Job
from kvlens.app.ui.common.widgets import plain
from kvlens.ledger.account import LossLedger
from kvlens.ledger.causes import CAUSES, NAMES, REST
from kvlens.ledger.frontier import Frontier
from kvlens.ledger.pooled import distances, ledgers_of, lost_trials, pooled
from kvlens.ledger.storage import stored_ledger
from kvlens.lens.severity import outcome
from kvlens.methods.naming import run_name
from kvlens.studies.table import Results
from kvlens.text.units import counted, si_bytes

TITLE = "Loss ledger: what the lost lead is made of"
WHOLE = "all arms"
ADDS_UP = (
    "The lead is the logit of full KV's token above this run's token, added over the lost steps of the answer. Each "
    "part is measured by repairing its cause in repeats of the run. The parts and the rest add up to the lead lost."
)


def run_ledger(reader: TraceReader) -> None:
    """Draw the ledger of a run that lost its answer, or the button that measures it; nothing for any other run."""
    stored = stored_ledger(data.runs_dir(), reader.uid)
    if stored is None and not _measurable(reader):
        return
    with st.expander(TITLE, expanded=stored is not None):
        if stored is None:
            st.markdown("The ledger splits the lost lead into causes. It repeats the run once per set of causes.")
        else:
            _bar(reader, stored[0])
            _sentences(reader, *stored)
        whole = stored is not None and stored[1] is not None
        if not whole:
            words = "Measure the ledger" if stored is None else "Find the fewest bytes"
            _measure(f"ledger_{reader.uid}", [reader.uid, "--frontier"], words, f"Loss ledger of {reader.uid}")


def _measurable(reader: TraceReader) -> bool:
    """Return True for a run that lost its answer and that kvlens can repeat."""
    return reader.meta.is_steered and "lost" in outcome(reader).kinds


def beside_ledgers(runs: dict[str, TraceReader]) -> None:
    """Draw the stored ledgers of runs that are compared, one bar each; those that lost and have none get a button."""
    lost = {name: reader.uid for name, reader in runs.items() if _measurable(reader)}
    if not lost:
        return
    with st.expander(TITLE):
        ledgers = ledgers_of(data.runs_dir(), lost.items())
        _bars(ledgers, "compare-ledger")
        missing = [uid for name, uid in lost.items() if name not in dict(ledgers)]
        if missing:
            words = f"Measure {counted(len(missing), 'ledger')}"
            _measure(f"ledgers_{'_'.join(missing)}", missing, words, words)


def study_ledgers(results: Results) -> None:
    """Draw the ledgers of a study's lost runs: one bar per arm, and one for all arms."""
    lost = lost_trials(results)
    if not lost:
        return
    st.markdown("##### What the losses are made of")
    ledgers = ledgers_of(data.runs_dir(), lost)
    arms = {label for label, _ in ledgers}
    _bars(
        [*ledgers, *((WHOLE, ledger) for _, ledger in ledgers if len(arms) > 1)],
        f"kvlens-study-{results.info.id}-ledger",
    )
    lost_answers = counted(len(lost), "lost answer")
    st.caption(
        f"{len(ledgers)} of {lost_answers} have a ledger. A bar is the mean of their shares."
        if ledgers
        else f"No ledger of the {lost_answers} is measured yet."
    )
    _distances(results)
    if len(ledgers) < len(lost):
        words = f"Measure {counted(len(lost) - len(ledgers), 'ledger')}"
        arguments = ["--study", results.info.id, "--frontier"]
        _measure(f"ledgers_{results.info.id}", arguments, words, f"Loss ledgers of study {results.info.id}")


def _distances(results: Results) -> None:
    """Draw how far each arm is from the oracle frontier."""
    frame = distances(data.runs_dir(), results)
    if frame.empty:
        return
    columns = {
        "label": st.column_config.Column("arm"),
        "n": st.column_config.Column("lost answers"),
        "frontier_share": st.column_config.NumberColumn("oracle frontier, of full KV", format="percent"),
        "times": st.column_config.NumberColumn("resident, times the frontier", format="%.1f"),
    }
    st.dataframe(frame[list(columns)], hide_index=True, column_config=columns)
    st.caption(
        "Oracle frontier: the fewest resident bytes found that keep the answer. Medians over the arm's lost answers."
    )


def _bar(reader: TraceReader, ledger: LossLedger) -> None:
    frame = pooled([(run_name(reader.meta), ledger)])
    if frame.empty:
        return
    alt = "One bar: the logits of the lost lead that each cause took."
    chart(ledger_bars(frame, logits=True), frame, f"{reader.uid}-ledger", f"ledger_bar_{reader.uid}", alt)


def _bars(ledgers: Iterable[tuple[str, LossLedger]], stem: str) -> None:
    frame = pooled(ledgers)
    if len(frame):
        alt = "One bar per label: the share of the lost lead that each cause took."
        chart(ledger_bars(frame), frame, stem, f"bars_{stem}", alt)
        st.caption(plain(ADDS_UP))


def _sentences(reader: TraceReader, ledger: LossLedger, frontier: Frontier | None) -> None:
    """Say what each cause is and what its repair alone does, and how far the run is from the fewest bytes."""
    lines = []
    for share in sorted(ledger.shares, key=lambda share: -share.logits):
        back = {True: "brings the answer back", False: "does not bring the answer back", None: "was not tried"}
        lines.append(
            f"**{NAMES[share.cause]}** ({CAUSES[share.cause][1]}): {_took(share.logits, ledger)}; its repair alone "
            f"{back[share.restored]}."
        )
    lines.append(f"**{NAMES[REST]}**: {_took(ledger.rest, ledger)}.")
    st.markdown("  \n".join(lines))
    if frontier is not None:
        peak = int(reader.steps()["peak_bytes"].max())
        st.markdown(
            f"**Oracle frontier**: {si_bytes(frontier.resident_bytes)} resident, {frontier.share:.1%} of full KV, are "
            f"the fewest bytes found that keep this answer. This run had {si_bytes(peak)}, "
            f"{frontier.distance(peak):.1f} times as many, and lost it."
        )
    st.caption(plain(ADDS_UP))


def _took(logits: float, ledger: LossLedger) -> str:
    """Logits with their share of the lead lost; without a share where no lead was lost."""
    return f"{logits:+.2f} logits" + (f", {logits / ledger.lost:.1%}" if ledger.lost > 0 else "")


def _measure(key: str, arguments: Sequence[str], words: str, title: str) -> None:
    """Draw the button that measures ledgers, or the job that does."""
    manager = jobview.manager()
    job_id = st.session_state.get(key)
    job = manager.get(job_id) if job_id else None
    if job is not None and job.active:
        st.fragment(_follow, run_every=0.5)(job)
        return
    if job is not None and job.state != "done":
        jobview.ended(job)
    if st.button(words, key=f"{key}_start", icon=":material/stacked_bar_chart:"):
        runs = str(data.runs_dir().resolve())
        argv = [sys.executable, "-m", "kvlens", "ledger", *arguments, "--runs", runs, "--progress-json"]
        st.session_state[key] = manager.submit(argv, title)
        st.rerun()


def _follow(job: Job) -> None:
    if not job.active:
        st.rerun()
    jobview.progress(job)
