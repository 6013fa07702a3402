"""Ledgers of many runs: the mean share of each cause, and the lost runs of a study."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from kvlens.ledger.account import LossLedger
from kvlens.ledger.causes import CODES, NAMES, REST
from kvlens.ledger.storage import stored_ledger

if TYPE_CHECKING:
    from kvlens.studies.table import Results

COLUMNS = ("label", "cause", "name", "share", "logits", "n")
LOST = "lost"
"""kind of a run that left full KV and lost the answer (kvlens.lens.severity)"""


def pooled(ledgers: Iterable[tuple[str, LossLedger]]) -> pd.DataFrame:
    """Return one row per label and cause that took anything, the rest included: label, cause, name, share (mean over
    the ledgers of the cause's part of the lost lead; all of a label add up to 1), logits (mean), n (ledgers).

    Each answer counts alike, however large its lead. A ledger without a lost lead is left out.
    """
    by_label: dict[str, list[LossLedger]] = {}
    for label, ledger in ledgers:
        if ledger.lost > 0:
            by_label.setdefault(label, []).append(ledger)
    rows = []
    for label, label_ledgers in by_label.items():
        for cause in (*CODES, REST):
            logits = [ledger.logits(cause) for ledger in label_ledgers]
            if not any(logits):
                continue
            share = sum(part / ledger.lost for part, ledger in zip(logits, label_ledgers, strict=True)) / len(
                label_ledgers
            )
            rows.append((label, cause, NAMES[cause], share, sum(logits) / len(label_ledgers), len(label_ledgers)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def distances(runs_dir: Path, results: Results) -> pd.DataFrame:
    """Return one row per arm of a study with lost runs whose frontier is stored: label, n, frontier_share (median of
    the fewest bytes over full KV's), times (median of the run's resident bytes over the fewest)."""
    rows = []
    figures = {trial.uid: trial.figures or {} for trial in results.trials}
    for label, uid in lost_trials(results):
        stored = stored_ledger(runs_dir, uid)
        resident = figures[uid].get("resident_bytes")
        if stored is not None and stored[1] is not None and resident is not None:
            rows.append((label, stored[1].share, stored[1].distance(resident)))
    frame = pd.DataFrame(rows, columns=["label", "frontier_share", "times"])
    grouped = frame.groupby("label", sort=False)
    return grouped.median().assign(n=grouped.size()).reset_index()


def ledgers_of(runs_dir: Path, labelled: Iterable[tuple[str, str]]) -> list[tuple[str, LossLedger]]:
    """Return (label, ledger) of those of the (label, uid) whose ledger is stored."""
    entries = ((label, stored_ledger(runs_dir, uid)) for label, uid in labelled)
    return [(label, stored[0]) for label, stored in entries if stored is not None]


def lost_runs(results: Results) -> list[str]:
    """Return the runs of a study that lost an answer, in the order of its trials."""
    return [uid for _, uid in lost_trials(results)]


def lost_trials(results: Results) -> list[tuple[str, str]]:
    """Return (label of the arm, uid) of the study's runs that lost an answer."""
    labels = results.labels
    return [
        (labels[trial.arm], trial.uid)
        for trial in results.trials
        if trial.uid and trial.arm in labels and LOST in (trial.figures or {}).get("kinds", ())
    ]
