"""How long a run will likely take, phase by phase, and how large its trace will be: by the runs of the same model that
are stored here. Estimates, labelled so wherever they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from kvlens import methods
from kvlens.runs.preflight import TOKEN_BYTES
from kvlens.store.errors import TraceError
from kvlens.store.reader import list_runs
from kvlens.store.runinfo import read_info

MOST = 5
"""runs that an estimate is made by, the newest"""
ORDER = ("load", "prefill", "check", "reference", "surprisal", "place", "decode", "effect", "store")
"""phases of a compared run, as its job reports them; the reference computes the surprisals for both"""
PLACING = "placing, recording and storing"
"""phase `place` as estimates name it: what is left of a run's duration without its other times"""
_TIMES = ("prefill_s", "surprisal_s", "decode_s", "full_kv_s", "effect_s", "load_s")
Row = dict[str, Any]


@dataclass(frozen=True)
class Likely:
    """What runs of the model here say of another one."""

    phases: dict[str, float]
    """seconds by phase, in the order in which they come; a phase that no run shows is left out. `effect` comes only if
    the run leaves full KV"""
    trace_bytes: int
    runs: int
    same_method: bool
    """they are the method's own; else any method's"""
    finished: frozenset[str] = frozenset()
    """phases that were gone through before the run was asked for (kvlens.app.ui.common.readahead); none of `phases`"""

    @property
    def prefill_s(self) -> float | None:
        """Of the prompt with its tokens' surprisals; None where this prompt, or that of every run, was read
        before."""
        return None if "prefill" not in self.phases else self.phases["prefill"] + self.phases.get("surprisal", 0.0)

    @property
    def decode_s(self) -> float:
        """For all its steps."""
        return self.phases["decode"]

    def after(self, finished: frozenset[str]) -> Likely:
        """Return what is left when some phases have been gone through."""
        phases = {phase: seconds for phase, seconds in self.phases.items() if phase not in finished}
        return replace(self, phases=phases, finished=finished)

    @property
    def total_s(self) -> float:
        """Of all phases, `effect` apart."""
        return sum(seconds for phase, seconds in self.phases.items() if phase != "effect")


def likely(
    runs_dir: Path, model: str, method: str, prompt_tokens: int, steps: int, step_bytes: int, against: bool = False
) -> Likely | None:
    """For `prompt_tokens` and at most `steps` steps, each of which adds `step_bytes` to the trace. against: compared
    with full KV. None where no whole run of the model is stored here."""
    table = list_runs(runs_dir)
    whole = (table["status"] == "completed") & (table["model"] == model) & (table["steps"] > 0)
    whole &= ~table["hold"].map(bool) & (table["prompt_tokens"] > 0)
    own_runs = table[whole & (table["method"] == method)]
    used = own_runs if len(own_runs) else table[whole]
    rows = _newest(runs_dir, used)
    if not rows:
        return None
    full_rows = _newest(runs_dir, table[whole & (table["method"] == methods.REFERENCE)])
    sizes = [
        row["disk_bytes"] + TOKEN_BYTES * (prompt_tokens - row["prompt_tokens"]) + step_bytes * (steps - row["steps"])
        for row in rows
    ]
    placing_s = _median(rows, _placing, "duration_s")
    stored = {"load": _median(rows, lambda row: row["load_s"], "load_s"), "decode": _per_step(rows) * steps}
    stored |= _reading(rows, prompt_tokens) or _reading(full_rows, prompt_tokens)
    stored["place"] = None if placing_s is None else placing_s * prompt_tokens
    if against and method != methods.REFERENCE:
        stored["check"] = None if methods.get(method).floor_is_exact else stored["place"]
        stored["reference"] = _per_step(full_rows or rows) * steps
        stored["effect"] = _median(rows, lambda row: row["effect_s"], "effect_s")
    phases = {phase: seconds for phase in ORDER if (seconds := stored.get(phase)) is not None}
    return Likely(phases, max(0, round(median(sizes))), len(rows), bool(len(own_runs)))


def remaining_s(
    phases: dict[str, float], phase: str, count: int, total: int, elapsed_s: float, lost: bool
) -> float | None:
    """Return the seconds that a run in `phase` still takes; None where its phases are not known. elapsed_s: since the
    phase began. lost: the run has left full KV, so that its effects will be computed."""
    if phase not in ORDER or not phases:
        return None
    if total > 1 and count:
        left_s = elapsed_s * (total - count) / count
    elif phase in phases:
        left_s = max(0.0, phases[phase] - elapsed_s)
    else:
        return None
    later = ORDER[ORDER.index(phase) + 1 :]
    return left_s + sum(phases.get(name, 0.0) for name in later if name != "effect" or lost)


def _newest(runs_dir: Path, table: pd.DataFrame) -> list[Row]:
    rows = (_times(runs_dir, uid) for uid in table["uid"])
    return list(islice((row for row in rows if row is not None), MOST))


def _median(rows: Sequence[Row], figure: Callable[[Row], float], name: str) -> float | None:
    """The median of a figure over the rows that have the time `name`; None where none has."""
    figures = [figure(row) for row in rows if row[name] is not None]
    return median(figures) if figures else None


def _per_step(rows: Sequence[Row]) -> float:
    return median((row["decode_s"] + (row["full_kv_s"] or 0.0)) / row["steps"] for row in rows)


def _reading(rows: Sequence[Row], tokens: int) -> dict[str, float | None]:
    """Seconds of reading the prompt and of its tokens' surprisals, which some methods need while they read; {} where
    all rows took a prompt that was read before."""
    whole_s = _median(
        rows, lambda row: (row["prefill_s"] + (row["surprisal_s"] or 0.0)) / row["prompt_tokens"], "prefill_s"
    )
    if whole_s is None:
        return {}
    surprisal_s = _median(rows, lambda row: row["surprisal_s"] / row["prompt_tokens"], "surprisal_s") or 0.0
    return {"prefill": max(0.0, whole_s - surprisal_s) * tokens, "surprisal": surprisal_s * tokens or None}


def _placing(row: Row) -> float:
    """Seconds a prompt token of what is none of the other times: placing the prompt, recording, and storing."""
    others_s = sum(row[name] or 0.0 for name in ("prefill_s", "surprisal_s", "decode_s", "full_kv_s"))
    return float(max(0.0, row["duration_s"] - others_s) / row["prompt_tokens"])


def _times(runs_dir: Path, uid: str) -> Row | None:
    """What run.json says of a run's times and size; None where it says too little, or the times are also those of
    runs whose steps were computed together with its own."""
    try:
        info = read_info(runs_dir / uid)
    except TraceError:
        return None
    extra = info.get("extra")
    if isinstance(extra, dict) and extra.get("batched"):
        return None
    row = {name: info.get(name) for name in ("prompt_tokens", "steps", "disk_bytes", "duration_s")}
    row |= {name: extra.get(name) for name in _TIMES} if isinstance(extra, dict) else {}
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and value > 0}
    if not {"prompt_tokens", "steps", "disk_bytes", "decode_s"} <= numbers.keys():
        return None
    return dict.fromkeys(("duration_s", *_TIMES)) | numbers
