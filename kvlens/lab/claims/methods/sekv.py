"""SeKV's claims: where it zooms (Fig. 5), what its parts and sizes are worth (Tables 5 and 7), what factors weigh (eq.
18-20).

All of it is measured live. Exact match is compared on the same prompts; a difference counts when a two-sided sign test
over the prompts on which two arms disagree gives p < 0.05. Under what a model is measured: claims_setting.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvlens.lab.claims import Claim
from kvlens.lab.claims.methods.sekv_runs import Bench
from kvlens.lab.claims.methods.sekv_setting import Whole, arms, setting_of
from kvlens.lab.claims.methods.sekv_tables import tables
from kvlens.lab.claims.methods.sekv_weights import weights
from kvlens.lab.claims.methods.sekv_zoom import zooms

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """Checks all of them on a model; claims about what is trained cannot be decided where nothing was."""
    setting = setting_of(engine.loaded.name)
    bench = Bench(engine, setting, prompts, report)
    base = bench.base(setting.tasks[0], setting.length, setting.budget)
    of = bench.arms(arms(setting, base, _one_threshold(bench, base)))
    return [*zooms(bench), *tables(setting, base, of), *weights(setting, base, of)]


def _one_threshold(bench: Bench, base: Whole) -> float:
    """For all heads, in place of their own: the mean of the trained router's, or of those that the first prompt's
    untrained gate comes to."""

    from kvlens.lab.training.sekv.files import load_router
    from kvlens.methods.sekv.trained import SHIPPED

    setting = bench.setting
    if setting.trained:
        return float(load_router(SHIPPED, bench.engine.loaded.shape).threshold.sigmoid().mean())
    assert setting.gate is not None
    seen = bench.run(setting.tasks[0], 0, replace(base.params, zoom_rate=setting.gate), setting.budget)
    assert seen.tau is not None
    return seen.tau
