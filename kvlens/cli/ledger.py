"""`kvlens ledger`: the causes that a lost answer's lead is split into, and the fewest bytes that keep the answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlens.cli.options import AsJson, ProgressJson, RunsDir, err, runs_folder, show_table
from kvlens.text.plaintext import strict_json
from kvlens.text.units import counted, si_bytes

if TYPE_CHECKING:
    from kvlens.ledger.account import LossLedger
    from kvlens.ledger.frontier import Frontier


def ledger(
    uid: Annotated[list[str] | None, typer.Argument(help="Runs that lost an answer.")] = None,
    study: Annotated[str | None, typer.Option(help="Every lost run of this study.")] = None,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Also find the fewest resident bytes that keep the answer.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what is stored.")] = False,
    runs: RunsDir = None,
    progress_json: ProgressJson = False,
    as_json: AsJson = False,
) -> None:
    """Split the lead that a run lost into causes that add up, and store the ledger beside the run."""
    from kvlens.cli.progress import Bar, JsonLines, reserve_stdout
    from kvlens.ledger.ofrun import measure_ledger
    from kvlens.ledger.storage import stored_ledger
    from kvlens.runs.stopping import stop_signals

    folder, cancelled = runs_folder(runs), stop_signals()
    uids = [*(uid or ()), *([] if study is None else _lost_of(folder, study))]
    if not uids:
        raise ValueError("name a run that lost an answer, or a study with --study.")
    reporter: Bar | JsonLines = JsonLines() if progress_json else Bar(err)
    results = {}
    frontiers: dict[str, Frontier] = {}
    try:
        with reserve_stdout(progress_json):
            for place, run in enumerate(dict.fromkeys(uids)):
                if len(uids) > 1:
                    reporter.say(f"Run {run}, {place + 1} of {len(uids)}")
                entry = None if again else stored_ledger(folder, run)
                if entry is None or (frontier and entry[1] is None):
                    fewest = frontiers.get(_reference_of(folder, run), True) if frontier else False
                    entry = measure_ledger(folder, run, reporter.report, cancelled, frontier=fewest, say=reporter.say)
                if entry[1] is not None:
                    frontiers[_reference_of(folder, run)] = entry[1]
                results[run] = entry
    except BaseException as error:
        reporter.failed(error)
        raise
    reporter.end_run(uids[0], "completed")
    if progress_json:
        return
    if as_json:
        typer.echo(strict_json([_plain(run, *entry) for run, entry in results.items()]))
        return
    for run, entry in results.items():
        _say(run, *entry)


def _reference_of(folder: Path, uid: str) -> str:
    """Return the uid of the run's reference, which runs of one prompt share; its own if it names none."""
    from kvlens.store.reader import TraceReader

    with TraceReader.open(folder, uid) as reader:
        return reader.meta.reference or uid


def _lost_of(folder: Path, study: str) -> list[str]:
    """Return the runs of a study that lost an answer. Raises TraceError with one sentence."""
    from kvlens.ledger.pooled import lost_runs
    from kvlens.studies.table import Results

    lost = lost_runs(Results.read(folder, study))
    if not lost:
        raise ValueError(f"study {study} has no run that lost an answer yet.")
    return lost


def _say(uid: str, ledger: LossLedger, frontier: Frontier | None) -> None:
    from kvlens.ledger.causes import NAMES, REST

    steps = counted(len(ledger.steps), "lost step")
    typer.echo(
        f"{uid}: full KV's tokens lead by {ledger.lead_full:.2f} logits over {steps}, in this run by "
        f"{ledger.lead_run:.2f}; lost {ledger.lost:.2f}"
    )
    rows = [
        [
            NAMES[share.cause],
            f"{share.logits:+.2f}",
            _percent(share.logits, ledger.lost),
            f"{share.alone:+.2f}",
            {True: "yes", False: "no", None: "not tried"}[share.restored],
            share.spans,
            "" if share.worst_triple is None else "L{} KV{} span {}".format(*share.worst_triple),
        ]
        for share in ledger.shares
    ]
    rows.append([NAMES[REST], f"{ledger.rest:+.2f}", _percent(ledger.rest, ledger.lost), "", "", "", ""])
    columns = ["cause", "logits", "share", "repaired alone", "answer back", "spans", "most unread"]
    show_table(columns, rows)
    if frontier is not None:
        typer.echo(
            f"fewest bytes found that keep the answer: {si_bytes(frontier.resident_bytes)}, {frontier.share:.1%}"
        )


def _percent(logits: float, lost: float) -> str:
    return f"{logits / lost:.1%}" if lost > 0 else ""


def _plain(uid: str, ledger: LossLedger, frontier: Frontier | None) -> dict[str, Any]:
    return {
        "uid": uid,
        **ledger.to_json(),
        "lost": ledger.lost,
        "frontier": None if frontier is None else {**vars(frontier), "share": frontier.share},
    }
