"""`kvlens whatif --list`: what was tried on a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from kvlens.cli.options import show_table
from kvlens.lens.tries import Try, tries_in
from kvlens.store.reader import TraceReader
from kvlens.text.plaintext import json_text
from kvlens.text.units import si_bytes


def listed(runs_dir: Path, uid: str, as_json: bool) -> None:
    """Print it, newest first. Raises TraceError for a run that cannot be read."""
    with TraceReader.open(runs_dir, uid) as reader:
        budget = reader.meta.budget_bytes
    found = tries_in(runs_dir, uid)
    if as_json:
        typer.echo(json_text([_plain(one, budget) for one in found]))
        return
    if not found:
        typer.echo(f"nothing was tried on run {uid}; hold one of its spans with: kvlens whatif {uid} --span ID")
        return
    columns = ["uid", "tried", "answer", "restored, or stands", "KL before", "KL after", "bytes more"]
    show_table(columns, [_row(one, budget) for one in found])


def _row(one: Try, budget: int | None) -> list[Any]:
    said, more = one.summary, one.more_bytes(budget)
    if said is None:
        return [one.uid, one.brief(), None, None, None, None, None]
    before, after = (None if kl is None else f"{kl:.3g}" for kl in (said.kl_before, said.kl_after))
    return [one.uid, one.brief(), said.answer_after, one.outcome(), before, after, si_bytes(more)]


def _plain(one: Try, budget: int | None) -> dict[str, Any]:
    return {
        "uid": one.uid,
        "tried": one.words(),
        "holds": [str(piece) for piece in one.pieces],
        "drops": [str(piece) for piece in one.dropped_pieces],
        "from_step": one.from_step,
        "changed": one.changed,
        "more_bytes": one.more_bytes(budget),
        **({} if one.summary is None else one.summary.stored()),
    }
