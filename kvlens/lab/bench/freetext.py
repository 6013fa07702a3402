"""Free text as a measure: a method is fed the very words of a real text behind a context, and each next-token
distribution is compared with full KV's. No task, no answer, no luck of one token.

Controls stand in the same table: full KV in other number formats (what rounding alone changes, the noise floor), and
random eviction among the methods. Resumable; one line per trial is kept. Trials of a passage may share their decode
steps (`batch`), which rounds as other sizes of a matrix do: the reference is computed alone.

It is no study of kvlens.studies: its noise floor compares other number formats with float32's full KV, and a study
compares an arm with full KV in the arm's own format.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from inspect import getfile
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from kvlens import methods
from kvlens.lab.bench import kept as lines_kept
from kvlens.lab.bench.passages import passage
from kvlens.lab.bench.passagetrials import Passages, Place
from kvlens.lab.bench.provenance import about, made_otherwise, origin
from kvlens.lab.bench.textrequest import FreeTextRequest, Planned
from kvlens.lab.bench.trials import missing
from kvlens.statistics import of_mean
from kvlens.tasks.texts import EVALUATION

FIGURES = (
    "kl",
    "agreement",
    "nats",
    "full_nats",
    "coverage",
    "selection_recall",
    "attended_share",
    "resident_share",
    "read_share",
)
"""of an arm, means over its passages"""


@lines_kept.alone
def measure(
    request: FreeTextRequest,
    kept: Path,
    report: Callable[[int, int, dict[str, Any]], None],
    say: Callable[[str], None] = lines_kept.silent,
) -> dict[str, Any]:
    """Run what is not in `kept` (one JSON line per trial) yet -> the table with its provenance. report(done, total,
    row); say(line) where kept trials are run again. Raises ValueError for a file that does not hold trials, Refusal
    `batch_rotary` for trials of a model that cannot share steps."""
    import torch

    from kvlens.engine.engine import Engine
    from kvlens.engine.models import load
    from kvlens.studies.batching import carry_out_together

    torch.set_num_threads(1)
    named = {methods.REFERENCE, *request.methods}
    sources = Path(__file__), Path(getfile(Passages)), Path(getfile(passage))  # they decide what a trial is, too
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    shared = request.first_seed, request.length, request.tokens, EVALUATION.sha256, digest
    origins = {name: origin(request.model, name, "text", *shared) for name in named}
    trials = request.trials()
    keys = {planned.key for planned in trials}
    stored_rows = lines_kept.read(kept, ("key", "method", "origin", "dtype"), lambda row: row["key"] in keys)
    if line := made_otherwise(stored_rows, origins):
        say(line)
    for line in missing(request.model, request.methods):
        say(line)
    rows = {row["key"]: row for row in stored_rows if row["origin"] == origins[row["method"]]}
    passages, until = Passages(request, Engine(load(request.model))), time.monotonic() + 60 * request.minutes

    def finish(result: tuple[Planned, dict[str, Any]]) -> None:
        planned, figures = result
        row = {"key": planned.key, **asdict(planned)} | figures | {"origin": origins[planned.method]}
        rows[planned.key] = row
        lines_kept.append(kept, row)
        report(len(rows), len(trials), row)

    def stop() -> bool:
        return time.monotonic() > until

    for index, members in groupby(trials, lambda planned: planned.index):
        waiting = [[planned] for planned in members if planned.key not in rows]
        if waiting and not stop():
            passages.turn(index)
            carry_out_together(
                request.batch,
                waiting,
                lambda seat, *_: Place.at(passages, seat),
                Place.run,
                finish,
                lambda *phase: None,
                stop,
            )
    provenance = about(tuple(sorted(named)), request.model) | {
        "request": request.model_dump(mode="json"),
        "text": EVALUATION.title,
        "origins": origins,
        "trials": len(rows),
        "planned": len(trials),
    }
    return {"about": provenance, "lines": [_line(arm, list(rows.values())) for arm in request.arms()]}


def _line(arm: tuple[str, str, str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One arm: means over passages, which have equally many tokens; of KL its 95 % interval."""
    arm_rows = [row for row in rows if (row["method"], row["budget"], row["dtype"]) == arm]
    complete, short = (
        [row for row in arm_rows if "kl" in row],
        [row["infeasible"] for row in arm_rows if "infeasible" in row],
    )
    line: dict[str, Any] = dict(zip(("method", "budget", "dtype"), arm, strict=True)) | {"n": len(complete)}
    line["presets"] = dict(Counter(row.get("preset") or "defaults" for row in arm_rows))
    line |= {name: fmean(row[name] for row in complete) if complete else None for name in FIGURES}
    low, high = of_mean([row["kl"] for row in complete]) or (None, None)
    line |= {"kl_low": low, "kl_high": high, "failed_self_checks": sum(not row["passed"] for row in complete)}
    line["refused"] = next((row["refused"] for row in arm_rows if "refused" in row), None)
    return line | {"smallest_feasible": fmean(short) if short else None}
