"""CompressKV's claims: what semantic retrieval heads are to the model (Table 2a, Fig. 9), and what they and the layer
budgets are worth when tokens are dropped (Tables 2b, 3a, 3b)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvlens.lab.claims import Claim, Setting, Test, setting_of
from kvlens.lab.claims.plan import FEWEST
from kvlens.methods.statements import ONE_NEEDLE, Statement, arm
from kvlens.statistics import mean_interval
from kvlens.statistics.student import Sample, sample

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine
    from kvlens.methods.compresskv.heads import HeadFigures

FIRST_SEED = 9_700_000
RETRIEVES = 2.0
"""ours: a head retrieves when it attends the answer this many times as much as attending all tokens alike would"""
SHARES = (0.01, 0.02, 0.03)
"""of the query heads that are switched off; the paper: 10, 20 and 30 of 1,024"""
CONTROL = "lowest SRH"
NOTHING = ("none", 0)
Heads = list[tuple[int, int]]
"""(layer, query head)s"""
Scores = dict[tuple[str, int], list[float]]
"""(kind of the heads that are off, number of heads) -> task score per prompt"""

STATEMENTS = (
    Statement(
        "CompressKV Table 2b",
        "Semantic retrieval heads choose better tokens than traditional ones.",
        arm("compresskv", tokens=96, layers="equal"),
        (arm("compresskv", tokens=96, layers="equal", heads="trh"),),
        tasks=ONE_NEEDLE,
    ),
    Statement(
        "CompressKV Table 3a",
        "Choosing by semantic retrieval heads answers more than by all heads.",
        arm("compresskv", tokens=96, layers="equal"),
        (arm("compresskv", tokens=96, layers="equal", heads="all"),),
        tasks=ONE_NEEDLE,
    ),
    Statement(
        "CompressKV Table 3a",
        "Layer budgets answer more than as many tokens in every layer.",
        arm("compresskv", tokens=96),
        (arm("compresskv", tokens=96, layers="equal"),),
        tasks=ONE_NEEDLE,
    ),
    Statement(
        "CompressKV Table 3b",
        "Four heads per layer are as good as six and as all.",
        arm("compresskv", tokens=96, layers="equal"),
        (
            arm("compresskv", tokens=96, layers="equal", top_heads=6),
            arm("compresskv", tokens=96, layers="equal", heads="all"),
        ),
        "as good",
        tasks=ONE_NEEDLE,
        beside=(arm("compresskv", tokens=96, layers="equal", top_heads=2),),
    ),
)


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """Check what calibration and masked heads show. Raises ValueError for a model without a calibration."""
    from kvlens.methods.calibration import read_figures
    from kvlens.methods.compresskv.method import CompressKV

    loaded = engine.loaded
    figures: HeadFigures = read_figures(CompressKV, CompressKV.Parameters(), loaded.shape, loaded.name)["head scores"]
    setting = setting_of(loaded.name)
    orders = {kind: ranked(figures.scores[kind]) for kind in ("srh", "trh")}
    orders[CONTROL] = orders["srh"][::-1]
    counts = [max(least, round(share * len(orders["srh"]))) for least, share in enumerate(SHARES, 1)]
    scores = mask_heads(engine, setting, orders, counts, prompts, report)
    return [zero_layers(figures, loaded.name), masking(scores, orders, counts, setting)]


def ranked(scores: list[list[float]]) -> Heads:
    """Return all heads, the largest score first, ties by place. scores: per layer, per query head."""
    heads = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    return sorted(heads, key=lambda place: (-scores[place[0]][place[1]], place))


def zero_layers(figures: HeadFigures, model: str) -> Claim:
    """Judge Fig. 9 by the calibrated head scores."""
    srh, trh = np.array(figures.scores["srh"]), np.array(figures.scores["trh"])
    largest = {layer: float(srh[layer].max()) for layer in range(len(trh)) if trh[layer].max() == 0}
    chance = figures.chance or math.nan
    retrieving = [layer for layer, score in largest.items() if score > RETRIEVES * chance]
    listed = ", ".join(f"layer {layer}: {score:.3f}" for layer, score in largest.items()) or "there is none"
    reason = "No head there attends the answer clearly more than attending all tokens alike would."
    if not largest:
        reason = f"There is no layer of {model} without a traditional retrieval head."
    return Claim(
        "compresskv",
        "CompressKV Fig. 9, sec. 4.7",
        "Layers in which no head passes the top-1 rule have semantic retrieval heads nonetheless.",
        f"Layers of {model} whose TRH scores are all 0, with their largest SRH score: {listed}. Attending all tokens "
        f"alike scores {chance:.3f}; {len(retrieving)} of {len(largest)} have a head above {RETRIEVES:g} times that.",
        bool(retrieving) if largest else None,
        "" if retrieving else reason,
        {"largest_srh": largest, "chance": chance, "retrieving": retrieving, "srh": srh.tolist(), "trh": trh.tolist()},
    )


def mask_heads(
    engine: Engine,
    setting: Setting,
    orders: dict[str, Heads],
    counts: list[int],
    prompts: int,
    report: Callable[[str], None],
) -> Scores:
    """Answer the setting's first task under full KV with heads off while decoding: the first of each order, of CONTROL
    the largest number only."""
    from kvlens import tasks
    from kvlens.engine.engine import Options
    from kvlens.lab.bench.trialprompts import Prompts
    from kvlens.lab.calibrate.projection import heads_off
    from kvlens.methods.full import FullKV

    task, make = tasks.get(setting.tasks[0]), Prompts(engine, FIRST_SEED)
    masks = [NOTHING, *((kind, count) for kind in orders for count in (counts if kind != CONTROL else counts[-1:]))]
    scores: Scores = {mask: [] for mask in masks}
    for index in range(prompts):
        prompt_text, prompt, read = make(task.name, setting.length, index)
        for kind, count in masks:
            with heads_off(engine.loaded, orders.get(kind, [])[:count]):
                result = engine.run(prompt, FullKV, FullKV.Parameters(), None, Options(task.new_tokens), read=read)
            scores[kind, count].append(task.grade(prompt_text, result.text))
        report(f"compresskv masking: prompt {index + 1} of {prompts}")
    return scores


def masking(scores: Scores, orders: dict[str, Heads], counts: list[int], setting: Setting) -> Claim:
    """Judge Table 2a: the drop by SRH minus the drop by TRH, prompt by prompt, where the lists hold different heads."""
    base, n = np.array(scores[NOTHING]), len(scores[NOTHING])
    drops = {mask: float(np.mean(base - np.array(values))) for mask, values in scores.items()}
    differing = [count for count in counts if set(orders["srh"][:count]) != set(orders["trh"][:count])]
    gaps = [np.array(scores["trh", count]) - np.array(scores["srh", count]) for count in differing]
    gap = mean_interval(np.mean(gaps, axis=0).tolist(), FEWEST) if gaps else (math.nan, -math.inf, math.inf)
    control = drops[CONTROL, counts[-1]]
    drawn = sample(np.mean(gaps, axis=0).tolist()) if gaps else Sample(0, 0.0, 0.0)
    test = weigh_gaps(drawn, control < drops["srh", counts[-1]])
    listed = "; ".join(
        f"{kind.upper()} {', '.join(f'{drops[kind, n]:.2f}' for n in counts)}" for kind in ("srh", "trh")
    )
    first_heads = "; ".join(
        f"{kind.upper()} {', '.join(f'L{layer}H{head}' for layer, head in orders[kind][: counts[0]])}"
        for kind in ("srh", "trh")
    )
    return Claim(
        "compresskv",
        "CompressKV Table 2a, sec. 4.3",
        "Masking the best semantic retrieval heads hurts retrieval more than masking as many traditional ones.",
        f"Drop in exact match (from {base.mean():.2f}) with the {', '.join(map(str, counts))} best of "
        f"{len(orders['srh'])} heads off while decoding: {listed}; the {counts[-1]} of lowest SRH score {control:.2f}. "
        f"The lists differ at {differing or 'none'} of these; SRH costs {gap[0]:+.3f} more there ({gap[1]:+.3f} to "
        f"{gap[2]:+.3f}, 95 %). First heads: {first_heads}. {setting.model}, {n} prompts of {setting.tasks[0]}, "
        f"{setting.length:,} tokens.",
        None,
        figures={"drops": [[*mask, drop] for mask, drop in drops.items()], "gap": gap, "n": n},
        test=test,
    )


def weigh_gaps(gaps: Sample, is_specific: bool) -> Test:
    """Return what the gaps between the drops show. gaps: one per prompt; is_specific: the heads of the lowest scores
    cost less than those of the highest."""
    refuted, undecided = "Traditional retrieval heads hurt more.", "Both kinds hurt alike."
    if not is_specific:
        undecided = "Masking as many heads of the lowest scores hurts as much."
    if gaps.n < FEWEST or not is_specific:
        return Test(gaps.n, 1.0, 1.0, None, refuted, undecided)
    return Test(gaps.n, gaps.exceeds(0.0), gaps.falls_below(0.0), None, refuted, undecided)
