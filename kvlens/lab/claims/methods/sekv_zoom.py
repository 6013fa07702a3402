"""SeKV's Fig. 5: where it zooms. What 'sparse' and 'concentrated' mean in numbers is ours: the paper shows colours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvlens.lab.claims import Claim
from kvlens.lab.claims.methods.sekv_runs import ALL_SPANS, Bench
from kvlens.lab.claims.methods.sekv_setting import UNTRAINED_SHARE, Setting
from kvlens.statistics import sign_test

DARK = 0.1
"""a head that expands less than this share of its spans is dark"""
SOURCE = "SeKV Fig. 5, sec. 4.5"
SPARSE = f"expansion is sparse: most query heads expand few spans (here: half of them less than {DARK:.0%})"
FOCUS = "expansion is concentrated in few heads (here: the top quarter of them does half of it)"
LATE = "expansion is stronger in middle and later layers (here: mean of the first third against the rest)"
Maps = dict[str, list[np.ndarray]]
"""zoom rates [L, Hq] of each prompt, by the arm"""


def zooms(bench: Bench) -> list[Claim]:
    """The map of a trained router, or of what a router would be trained for where none is."""
    return trained(bench) if bench.setting.trained else untrained(bench)


# ---- a trained router
def trained(bench: Bench) -> list[Claim]:
    """Live, at the map's budget and without a limit."""
    setting = bench.setting
    task, length, budget = setting.tasks[0], setting.map_length, setting.map_budget
    runs: Maps = {"budget": [], "no limit": []}
    for index in range(bench.count):
        for name, limit in (("budget", budget), ("no limit", None)):
            seen = bench.run(task, index, bench.base(task, length, budget).params, limit, length=length)
            runs[name].append(np.nanmean(seen.zoom, axis=0))
        bench.report(f"sekv: zoom map {index + 1}/{bench.count}")
    maps = {name: np.mean(rates, axis=0) for name, rates in runs.items()}
    dark, top = ({name: of(rates) for name, rates in maps.items()} for of in (dark_share, top_quarter))
    third = {name: thirds(rates) for name, rates in maps.items()}
    figures = {name: rates.round(5).tolist() for name, rates in maps.items()}

    def both(form: Callable[[str], str]) -> str:
        what = f"{task}, {length} tokens, n={bench.count}"
        return f"{what}: {form('budget')} at {budget}, {form('no limit')} without a limit"

    sparse, focus = all(v >= 0.5 for v in dark.values()), all(v >= 0.5 for v in top.values())
    late = all(later > first for first, later in third.values())
    few = both(
        lambda name: f"{dark[name]:.0%} of heads expand less than {DARK:.0%}, mean zoom rate {maps[name].mean():.3f}"
    )
    layers = both(lambda name: f"{third[name][0]:.3f} in the first third, {third[name][1]:.3f} in the rest")
    return [
        Claim(
            "sekv",
            SOURCE,
            SPARSE,
            few,
            sparse,
            "" if sparse else "a budget makes any gate sparse; the gates of the demo router ask for more by themselves",
            figures,
        ),
        Claim(
            "sekv",
            SOURCE,
            FOCUS,
            both(lambda name: f"the top quarter does {top[name]:.0%}"),
            focus,
            "" if focus else "on this model the heads share the work more evenly",
            figures,
        ),
        Claim(
            "sekv",
            SOURCE,
            LATE,
            layers,
            late,
            "" if late else "on this model of six layers the first two expand at least as much as the others",
            figures,
        ),
    ]


# ---- no trained router
def untrained(bench: Bench) -> list[Claim]:
    """What eq. 12 asks of each head under exact attention, beside what the untrained gate expands of the same steps."""
    return judged(bench.setting, untrained_maps(bench))


def untrained_maps(bench: Bench) -> Maps:
    """Per prompt: 'mined' and 'asked', what eq. 12 asks at the positions that training mines and at all, of a run whose
    spans are all expanded exactly, which is full KV; and the untrained gate's rates at the map's budget and without a
    limit, fed that run's tokens."""
    setting = bench.setting
    task, length, budget = setting.tasks[0], setting.map_length, setting.map_budget
    maps: Maps = {"mined": [], "asked": [], "budget": [], "no limit": []}
    for index in range(bench.count):
        fitted = replace(bench.base(task, length, budget).params, zoom_rate=UNTRAINED_SHARE)
        whole = replace(fitted, zoom_rate=1.0, form="raw")
        full = bench.run(task, index, whole, None, length=length, coverage=True, oracle="all", top_k=ALL_SPANS)
        mined, asked = np.mean(full.asked, axis=0)
        maps["mined"].append(mined)
        maps["asked"].append(asked)
        for name, limit in (("budget", budget), ("no limit", None)):
            seen = bench.run(task, index, fitted, limit, length=length, forced=full.ids)
            maps[name].append(np.nan_to_num(np.nanmean(seen.zoom, axis=0)))
        bench.report(f"sekv: zoom map {index + 1}/{bench.count}")
    return maps


def judged(setting: Setting, maps: Maps) -> list[Claim]:
    """The verdict is over prompts, by a sign test, of what eq. 12 asks, at mined positions and at all alike."""
    n = len(maps["asked"])
    mean = {name: np.mean(rates, axis=0) for name, rates in maps.items()}
    figures = {name: rates.round(5).tolist() for name, rates in mean.items()}
    where = f"{setting.tasks[0]}, {setting.map_length} tokens, {setting.model}, n={n}"

    def claim(says: str, tell: Callable[[np.ndarray], str], true: Callable[[np.ndarray], bool]) -> Claim:
        counts = [sum(true(rates) for rates in maps[name]) for name in ("mined", "asked")]
        few, all_ = (None if sign_test(k, n - k) >= 0.05 else k > n - k for k in counts)
        holds = few if few == all_ else None
        measured = (
            f"{where}: eq. 12 under exact attention, at the positions that training here mines: {tell(mean['mined'])}, "
            f"so in {counts[0]} of {n} prompts; at all: {tell(mean['asked'])}, so in {counts[1]} of {n}. The untrained "
            f"gate, fed the same tokens: {tell(mean['budget'])} at {setting.map_budget}; {tell(mean['no limit'])} "
            "without a limit"
        )
        told = f"{says}; of what eq. 12 would have a router learn, since none is shipped for {setting.model}"
        return Claim("sekv", SOURCE, told, measured, holds, why(holds, few, all_), {**figures, "prompts": counts})

    def why(holds: bool | None, few: bool | None, all_: bool | None) -> str:
        told = "" if holds else "it is not so on this model; " if holds is False else "too few prompts agree; "
        if holds is None and few is not all_ and None not in (few, all_):
            told = "it depends on the positions that a router is trained on, and the paper gives no rule for them; "
        return told + (
            "this is what training aims at, not what a trained gate does; the untrained gate's thresholds are set so "
            f"that every head expands {UNTRAINED_SHARE:.0%} of spans over the last prompt queries, which makes its map"
        )

    return [
        claim(
            SPARSE,
            lambda x: f"{dark_share(x):.0%} of heads have less than {DARK:.0%}, mean {x.mean():.4f}",
            lambda x: dark_share(x) >= 0.5,
        ),
        claim(FOCUS, lambda x: f"the top quarter has {top_quarter(x):.0%}", lambda x: top_quarter(x) >= 0.5),
        claim(
            LATE,
            lambda x: f"{thirds(x)[0]:.4f} in the first third, {thirds(x)[1]:.4f} in the rest",
            lambda x: thirds(x)[1] > thirds(x)[0],
        ),
    ]


# ---- figures of a map [L, Hq]
def dark_share(rates: np.ndarray) -> float:
    """Of heads that expand less than DARK."""
    return float((rates < DARK).mean())


def thirds(rates: np.ndarray) -> tuple[float, float]:
    """Means of the first third of the layers and of the rest."""
    cut = len(rates) // 3
    return float(rates[:cut].mean()), float(rates[cut:].mean())


def top_quarter(rates: np.ndarray) -> float:
    """Share of all expansion that the quarter of the heads with most of it has."""
    ordered = np.sort(rates.ravel())[::-1]
    total = ordered.sum()
    return float(ordered[: -(-ordered.size // 4)].sum() / total) if total > 0 else 0.0
