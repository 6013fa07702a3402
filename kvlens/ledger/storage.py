"""Ledgers kept beside the runs: `runs/<uid>/ledger.json`. The file is no part of what the run recorded: it is written
when somebody asks for the ledger, and may be deleted at any time."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from kvlens.files import read_plain, replace_plain
from kvlens.ledger.account import LossLedger
from kvlens.ledger.frontier import Frontier
from kvlens.store.errors import TraceError, sentence
from kvlens.store.runinfo import run_dir

FILE = "ledger.json"
FORMAT = 2
"""of the file; another one is measured anew"""
_MOST_BYTES = 1 << 20


def stored_ledger(runs_dir: Path, uid: str) -> tuple[LossLedger, Frontier | None] | None:
    """Return (ledger, frontier) of a run as they were stored; None if none is stored, or none that can be read."""
    try:
        fields = json.loads(read_plain(run_dir(runs_dir, uid) / FILE, _MOST_BYTES))
        if fields["format"] != FORMAT:
            return None
        frontier = fields["frontier"]
        return LossLedger.from_json(fields["ledger"]), None if frontier is None else Frontier(**frontier)
    except (OSError, TraceError, ValueError, KeyError, TypeError, RecursionError):
        return None


def store_ledger(runs_dir: Path, uid: str, ledger: LossLedger, frontier: Frontier | None) -> None:
    """Keep a ledger beside its run, in the place of an older one. Raises TraceError with one sentence."""
    folder = run_dir(runs_dir, uid)
    target, temporary = folder / FILE, folder / f".{FILE}.{os.getpid()}.{secrets.token_hex(4)}"
    fields = {"format": FORMAT, "ledger": ledger.to_json(), "frontier": None if frontier is None else vars(frontier)}
    try:
        replace_plain(target, temporary, json.dumps(fields, allow_nan=False).encode(), durable=False)
    except OSError as error:
        raise TraceError(f"the ledger of run {uid} cannot be stored ({sentence(error)}): check the disk.") from error
