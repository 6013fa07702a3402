"""SeKV's Fig. 5 and the gates of Table 7: where a trained router zooms, and how many components its gates keep. The
numbers for 'sparse' and 'concentrated' are ours: the paper shows colours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvlens.lab.claims import Claim, setting_of
from kvlens.models.find import DEMO
from kvlens.records import PrefillRecord, StepRecord

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine
    from kvlens.lab.bench.trialprompts import Prompts

FIRST_SEED = 7_500_000
LIMITS = ("10%", "")
"""budgets of the toy, as shares of full KV: the paper's, and none"""
DARK = 0.1
"""a head that expands less than this share of its spans is dark"""
FIG5, TABLE7 = "SeKV Fig. 5, sec. 4.5", "SeKV Table 7"
SPARSE = f"Expansion is sparse: most query heads expand few spans (here: half of them less than {DARK:.0%})."
FOCUS = "Expansion is concentrated in few heads (here: the top quarter of them does half of it)."
LATE = "Expansion is stronger in middle and later layers (here: mean of the first third against the rest)."
GATES = "The gates rarely ask for as many components as the cap allows."


class Watch:
    """A sink that keeps zoom rates [L, Hq] per step, and the ranks of all spans with the largest rank of each."""

    def __init__(self, max_rank: int) -> None:
        self.max_rank = max_rank
        self.zoom: list[np.ndarray] = []
        self.ranks: list[np.ndarray] = []
        self.caps: list[np.ndarray] = []

    def prefill(self, record: PrefillRecord) -> None:
        tokens = {span.span: span.tok_end - span.tok_start for span in record.spans}
        spans: list[int] = next((row.values.astype(int).tolist() for row in record.journal if row.name == "spans"), [])
        for row in record.journal:
            if row.name in ("rank_k", "rank_v"):
                self.ranks.append(row.values)
                self.caps.append(np.minimum(self.max_rank, [tokens[span] for span in spans]))

    def step(self, record: StepRecord) -> None:
        self.zoom.append(record.head["zoom_rate"])


def limits(model: str) -> tuple[str, ...]:
    """Return the budgets at which a model's zooms are watched."""
    return LIMITS if model == DEMO else ("50%", "")


def watch(engine: Engine, prompts: int, report: Callable[[str], None]) -> dict[str, list[Watch]]:
    """Return one sink per prompt of the model's first task, by budget."""
    from kvlens.lab.bench.trialprompts import Prompts

    make = Prompts(engine, FIRST_SEED)
    sinks: dict[str, list[Watch]] = {limit: [] for limit in limits(engine.loaded.name)}
    for index in range(prompts):
        for limit, sink in watch_prompt(engine, make, index).items():
            sinks[limit].append(sink)
        report(f"sekv: zoom map {index + 1}/{prompts}")
    return sinks


def watch_prompt(engine: Engine, make: Prompts, index: int) -> dict[str, Watch]:
    """Return the sink of one prompt, by budget: with the parameters that a run takes by itself."""
    from kvlens.budget import Budget
    from kvlens.engine.engine import Options
    from kvlens.lab.bench.trials import NEW_TOKENS, chosen
    from kvlens.methods import get
    from kvlens.runs.request import default_preset

    model, method = engine.loaded.name, get("sekv")
    setting, usual = setting_of(model), default_preset("sekv", model)
    options = Options(max_new=NEW_TOKENS[setting.tasks[0]])
    _, prompt, read = make(setting.tasks[0], setting.length, index)
    sinks = {}
    for limit in limits(model):
        budget = Budget.parse(limit) if limit else None
        params = chosen(engine, prompt, method, {"preset": usual, "overrides": {}}, budget, options).params
        sinks[limit] = Watch(params.max_rank)
        engine.run(prompt, method, params, budget, options, sinks[limit], read=read)
    return sinks


def judge(sinks: dict[str, list[Watch]], prompts: int, model: str) -> list[Claim]:
    """Judge Fig. 5 at every budget, and the gates where there is none."""
    maps = {
        limit: np.mean([np.nanmean(sink.zoom, axis=0) for sink in watches], axis=0) for limit, watches in sinks.items()
    }
    setting = setting_of(model)
    where = f"{model}, {prompts} prompts of {setting.tasks[0]}, {setting.length:,} tokens"

    def claim(source: str, says: str, measured: list[str], holds: bool, reason: str) -> Claim:
        where_limited = (f"at {limit}" if limit else "without a limit" for limit in maps)
        shown = ", ".join(f"{words} {limit}" for words, limit in zip(measured, where_limited, strict=True))
        figures = {limit or "no limit": rates.round(5).tolist() for limit, rates in maps.items()}
        return Claim("sekv", source, says, f"{shown}; {where}.", holds, "" if holds else reason, figures)

    dark = [float((rates < DARK).mean()) for rates in maps.values()]
    top = [top_quarter(rates) for rates in maps.values()]
    third = [thirds(rates) for rates in maps.values()]
    capped_shares = [capped(watches) for watches in sinks.values()]
    return [
        claim(
            FIG5,
            SPARSE,
            [f"{share:.0%} of heads expand less than {DARK:.0%}" for share in dark],
            all(share >= 0.5 for share in dark),
            "The gates ask for more.",
        ),
        claim(
            FIG5,
            FOCUS,
            [f"the top quarter does {share:.0%}" for share in top],
            all(share >= 0.5 for share in top),
            "The heads share the work more evenly.",
        ),
        claim(
            FIG5,
            LATE,
            [
                f"{first_third:.3f} in the first third of the layers and {rest:.3f} in the rest"
                for first_third, rest in third
            ],
            all(first_third < rest for first_third, rest in third),
            "The first layers expand at least as much as the others.",
        ),
        claim(
            TABLE7,
            GATES,
            [f"{share:.0%} of ranks are at the cap (mean {mean:.1f})" for share, mean in capped_shares],
            all(share < 0.5 for share, _ in capped_shares),
            "The gates hardly close any component.",
        ),
    ]


def undecided(model: str) -> list[Claim]:
    """Return the same claims for a model without a trained router."""
    reason = f"No router that was trained for {model} is shipped."
    claims = ((FIG5, SPARSE), (FIG5, FOCUS), (FIG5, LATE), (TABLE7, GATES))
    return [Claim("sekv", source, says, "Nothing was run.", None, reason) for source, says in claims]


def capped(sinks: list[Watch]) -> tuple[float, float]:
    """Return (share of ranks at their cap, mean rank)."""
    ranks, caps = (np.concatenate([x for sink in sinks for x in getattr(sink, name)]) for name in ("ranks", "caps"))
    return float((ranks >= caps).mean()), float(ranks.mean())


def thirds(rates: np.ndarray) -> tuple[float, float]:
    """Return the mean of the first third of the layers, and of the rest. rates: [L, Hq]."""
    cut = len(rates) // 3
    return float(rates[:cut].mean()), float(rates[cut:].mean())


def top_quarter(rates: np.ndarray) -> float:
    """Return the share of all expansion that is done by the quarter of the heads that expand most. rates: [L, Hq]."""
    ordered = np.sort(rates.ravel())[::-1]
    total = ordered.sum()
    return float(ordered[: -(-ordered.size // 4)].sum() / total) if total > 0 else 0.0
