"""`kvlens whatif --list`: what was tried on a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from kvlens.cli.options import show_table
from kvlens.lens.tries import Try
from kvlens.lens.trylist import tries_in
from kvlens.store.reader import TraceReader
from kvlens.text.plaintext import json_text
from kvlens.text.units import si_bytes


def listed(runs_dir: Path, uid: str, as_json: bool) -> None:
    """Print it, newest first. Raises TraceError for a run that cannot be read."""
    with TraceReader.open(runs_dir, uid) as reader:
        budget = reader.meta.budget_bytes
    trials = tries_in(runs_dir, uid)
    if as_json:
        typer.echo(json_text([_plain(item, budget) for item in trials]))
        return
    if not trials:
        typer.echo(f"nothing was tried on run {uid}; hold one of its spans with: kvlens whatif {uid} --span ID")
        return
    columns = ["uid", "tried", "answer", "restored, or stands", "KL before", "KL after", "bytes more"]
    show_table(columns, [_row(item, budget) for item in trials])


def _row(trial: Try, budget: int | None) -> list[Any]:
    sentence, more = trial.summary, trial.more_bytes(budget)
    if sentence is None:
        return [trial.uid, trial.brief(), None, None, None, None, None]
    kl_before, kl_after = (None if kl is None else f"{kl:.3g}" for kl in (sentence.kl_before, sentence.kl_after))
    return [trial.uid, trial.brief(), sentence.answer_after, trial.outcome(), kl_before, kl_after, si_bytes(more)]


def _plain(trial: Try, budget: int | None) -> dict[str, Any]:
    return {
        "uid": trial.uid,
        "tried": trial.words(),
        "holds": [str(piece) for piece in trial.pieces],
        "drops": [str(piece) for piece in trial.dropped_pieces],
        "from_step": trial.from_step,
        "changed": trial.changed,
        "more_bytes": trial.more_bytes(budget),
        **({} if trial.summary is None else trial.summary.to_row()),
    }
