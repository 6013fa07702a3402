"""What methods run with on a model when nothing is set. No torch."""

from __future__ import annotations

from typing import Any

from kvlens import methods
from kvlens.budget import Budget
from kvlens.methods import FIT
from kvlens.methods.fitting import Sizes, choose
from kvlens.models.find import ready
from kvlens.models.sizes import NUMBER_BYTES, sizes_in
from kvlens.runs.request import default_budget, default_preset

POINTS, NEW = ((1024, "20%"), (4096, "10%")), 64
"""prompt tokens and budgets at which every method must run by itself, and tokens generated there"""


def fits(model: str, method: str) -> list[dict[str, Any]]:
    """What a method runs with on a model at POINTS when nothing is set: {"tokens", "budget", "preset", "fit" (values of
    the preset `fit`), "needs" and "usual_needs" (shares of full KV)}; [] where the model's sizes are not known yet."""
    kind, source = methods.get(method), ready(model)
    if source is None:
        return []
    shape, fitting = sizes_in(source, NUMBER_BYTES["float32"])[0], []
    for tokens, share in POINTS:
        budget = Budget.parse(default_budget(method) if kind.keeps_all else share)
        sizes = Sizes(shape, tokens - 1, NEW, budget.bytes(shape, tokens + NEW))
        usual = default_preset(method, model)
        plain = sizes.floor(kind, methods.make_parameters(kind, usual, {}))
        run, fit = (choose(kind, preset, usual, {}, sizes) for preset in (None, FIT))
        fitting.append(
            {
                "tokens": tokens,
                "budget": None if kind.keeps_all else share,
                "preset": run.preset,
                "fit": fit.fitted,
                "needs": round(fit.floor / sizes.full_kv_bytes, 4),
                "usual_needs": round(plain / sizes.full_kv_bytes, 4),
            }
        )
    return fitting
