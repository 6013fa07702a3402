"""The self-checks of an observed run. Checks of budgets and of moved bytes do not apply: kvlens moves nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from kvlens.engine.models import LoadedModel
from kvlens.observing.observer import Observer
from kvlens.observing.outcome import NextToken
from kvlens.recording.selfcheck import FINITE, MASS_TOLERANCE, MASSES, worse
from kvlens.records import SelfCheck
from kvlens.rows import MASS_COLUMNS

OUTPUT_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""relative difference of attention outputs that the order of sums may make; other formats: COARSE"""
COARSE = 3e-2


def self_checks(observer: Observer, rows: Sequence[NextToken], loaded: LoadedModel) -> list[SelfCheck]:
    """Return the checks of masses, rows, figures and outputs."""
    worst = oracle = errors = 0.0
    stored = 0
    for step in observer.steps:
        worst, errors = worse(worst, step.measured.worst), worse(errors, step.errors)
        oracle = worse(oracle, step.measured.oracle_worst)
        numbers = [np.isfinite(step.measured.head[name]) for name in ("entropy", *MASS_COLUMNS)]
        stored += int(np.logical_and.reduce(numbers).sum())
    expected = len(observer.steps) * observer.shape.layers * observer.shape.q_heads
    figures = [value for row in rows for value in (row.logprob, row.entropy) if value is not None]
    wrong = sum(not math.isfinite(value) for value in figures)
    tolerance = OUTPUT_TOLERANCE.get(loaded.model.dtype, COARSE)
    checks = [
        (MASSES, worst <= MASS_TOLERANCE, worst, "largest |sum of masses over roles - 1|"),
        ("no row is missing", stored == expected, stored, f"{expected} rows of (step, layer, query head) expected"),
        (FINITE, wrong == 0, wrong, "log-probabilities and entropies that are not finite"),
        (
            "masses make the model's own output",
            errors <= tolerance,
            errors,
            f"largest relative difference of weights x values from the attention's output, at most {tolerance:g}",
        ),
    ]
    if any(step.measured.oracle is not None for step in observer.steps):
        checks.append(("full attention adds up to 1", oracle <= MASS_TOLERANCE, oracle, "largest |sum over spans - 1|"))
    return [SelfCheck(name, bool(passed), float(value), detail) for name, passed, value, detail in checks]
