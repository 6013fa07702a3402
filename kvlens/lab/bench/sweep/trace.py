"""A trial as a stored run, compared with its full-KV reference, and the figures of its row read back from the trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens import tasks
from kvlens.lab.bench.sweep.file import COLUMNS
from kvlens.lab.bench.sweep.place import Place
from kvlens.lab.bench.trialprompts import Prompts, Trial
from kvlens.lab.bench.trials import arm, header, infeasible
from kvlens.lab.bench.trials import outcome as scored
from kvlens.lens.severity import outcome
from kvlens.memory.budget import BudgetInfeasible
from kvlens.runs.fingerprint import fingerprint
from kvlens.runs.preparing import Pairing, Prepared, plan, reference_key
from kvlens.runs.reference import obtain
from kvlens.runs.request import RunRequest
from kvlens.runs.storing import store
from kvlens.store.reader import TraceReader

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine


def carry_out_stored(engine: Engine, prompts: Prompts, trial: Trial, place: Place, runs_dir: Path) -> dict[str, Any]:
    """Like `trials.carry_out`, with the uid of the stored run. The reference of a prompt is made once for all methods,
    and is the trial of the method without a limit. Raises the store's TraceError when the trace cannot be written."""
    row = header(trial, engine.loaded.name)
    try:
        requested, prompt = prompts.asked(trial), prompts.prompt(trial)
    except ValueError as error:
        return row | {"refused": str(error)}
    full, drawn = trial.method == "full", tasks.get(trial.task).generation(trial.index)
    request = RunRequest(
        model=place.model,
        method=trial.method,
        overrides=row["overrides"],
        device=place.device,
        dtype=trial.dtype or place.dtype,
        budget=trial.budget if row["rule"] == "resident bytes" else None,
        max_new=drawn.new_tokens,
        seed=drawn.seed,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        against=not full,
        question=trial.question,
    )
    prepared = Prepared(engine, prompt, fingerprint(engine.loaded))
    try:
        planned = plan(request, prepared)
        row |= arm(planned.chosen, row)
        reference = obtain(prepared, request, runs_dir, _silent)
        if full:
            uid = reference.uid
        else:
            pairing = Pairing(reference, reference.uid, reference_key(request, prepared))
            uid = store(prepared, request, planned, pairing, runs_dir, _silent, lambda: False).uid
    except BudgetInfeasible as error:
        return row | infeasible(error)
    except ValueError as error:
        return row | {"refused": str(error)}
    with TraceReader.open(runs_dir, uid) as reader:
        came = {name: value for name, value in outcome(reader).columns().items() if name in COLUMNS}
        return row | _figures(reader) | scored(requested, reader.meta.output_text or "") | came | {"uid": uid}


def _silent(phase: str, count: int, total: int) -> None:
    """A sweep reports trials, not phases."""


def _figures(reader: TraceReader) -> dict[str, Any]:
    steps, full = reader.steps(), reader.meta.full_kv_bytes
    assert full is not None, "every run stored here says it"
    read = float(np.mean(reader.kv_cube("read_bytes").sum((1, 2))))
    return {
        "coverage": float(np.nanmean(reader.head_cube("coverage"))),
        "selection_recall": float(np.nanmean(reader.head_cube("selection_recall"))),
        "attended_tokens": float(np.mean(reader.kv_cube("attended_tokens"))),
        "read_bytes_per_step": read,
        "h2d_bytes_per_step": float(steps["h2d_bytes"].mean()),
        "d2h_bytes_per_step": float(steps["d2h_bytes"].mean()),
        "prompt_tokens": reader.meta.prompt_tokens,
        "resident_share": float(steps["peak_bytes"].max() / full),
        "read_share": read / full,
        "steps": reader.n_steps,
        "passed": bool(reader.self_checks()["passed"].all()),
    }
