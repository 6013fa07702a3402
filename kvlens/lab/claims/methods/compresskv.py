"""CompressKV's claims: what semantic retrieval heads are to the model (Table 2a, Fig. 9), and what they and the layer
budgets are worth when tokens are dropped (Tables 2b, 3a, 3b).

All arms answer the same prompts, so scores are compared prompt by prompt: a difference counts when the 95 % interval of
its mean (normal approximation over the prompts) leaves out 0; otherwise nothing is decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvlens.lab.claims import Claim
from kvlens.lab.claims.methods import compresskv_runs as claims_runs
from kvlens.lab.claims.methods.compresskv_runs import (
    BOTH,
    CONTROL,
    DECODE,
    HELD,
    NOTHING,
    Arm,
    Selected,
    Setting,
    ranked,
)
from kvlens.statistics import normal

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine
    from kvlens.methods.compresskv.heads import HeadFigures

RETRIEVES = 2.0
"""ours: a head retrieves when it attends the answer this many times as much as attending all tokens alike would"""
FEWEST = 5
"""ours: fewer prompts decide nothing"""
SUFFICE = 0.05
"""ours: heads beyond four bring nothing when their mean gain in score lies below this with 95 % confidence"""


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """All of them, on `prompts` prompts per task. Raises ValueError for a model without a shipped calibration."""
    found = claims_runs.head_figures(engine)
    shape = engine.loaded.shape
    at = claims_runs.setting(engine.loaded.name, shape.layers * shape.q_heads)
    order = {kind: ranked(found.scores[kind]) for kind in ("srh", "trh")}
    order[CONTROL] = order["srh"][::-1]
    right = claims_runs.masking(engine, at, order, prompts, report)
    selected = claims_runs.selection(engine, at, prompts, report)
    return [_zero_layers(found, at), _masking(right, order, at), *_selection(selected, at)]


# ------------------------------------------------------------------------------------------------------------- Fig. 9
def _zero_layers(found: HeadFigures, at: Setting) -> Claim:
    srh, trh = np.array(found.scores["srh"]), np.array(found.scores["trh"])
    zero = [layer for layer in range(len(trh)) if trh[layer].max() == 0]
    best = {layer: float(srh[layer].max()) for layer in zero}
    chance = found.chance or math.nan
    retrieve = [layer for layer, value in best.items() if value > RETRIEVES * chance]
    says = "Layers in which no head passes the top-1 rule have semantic retrieval heads nonetheless."
    listed = ", ".join(f"layer {layer}: {value:.3f}" for layer, value in best.items()) or "there is none"
    measured = (
        f"Layers of {at.named} whose TRH scores are all 0, with their largest SRH score: {listed}. Attending all "
        f"tokens alike scores {chance:.3f}; {len(retrieve)} of {len(zero)} have a head above {RETRIEVES:g} times that."
    )
    figures = {
        "trh_zero_layers": zero,
        "largest_srh": best,
        "chance": chance,
        "retrieving": retrieve,
        "srh": srh.tolist(),
        "trh": trh.tolist(),
    }
    holds = None if not zero else bool(retrieve)
    reason = (
        ""
        if holds
        else f"There is no layer of {at.named} without a traditional retrieval head."
        if not zero
        else (
            "The scores there are above 0, as softmax weights always are, but no head attends the answer "
            "clearly more than attending all "
            "tokens alike would: these layers do not retrieve."
        )
    )
    return Claim("compresskv", "CompressKV Fig. 9, sec. 4.7", says, measured, holds, reason, figures)


# ----------------------------------------------------------------------------------------------------------- Table 2a
def _masking(right: dict[Arm, list[float]], order: dict[str, list[tuple[int, int]]], at: Setting) -> Claim:
    n, most = len(right[NOTHING]), at.masked[-1]
    drop = {arm: float(np.mean(right[NOTHING]) - np.mean(values)) for arm, values in right.items()}
    differ = [count for count in at.masked if set(order["srh"][:count]) != set(order["trh"][:count])]
    gaps = [np.array(right["trh", count, DECODE]) - np.array(right["srh", count, DECODE]) for count in differ]
    holds, gap = decide(np.mean(gaps, axis=0)) if differ else (None, "")

    def drops(counts: tuple[int, ...], when: str) -> str:
        rows = {kind: ", ".join(f"{drop[kind, count, when]:.2f}" for count in counts) for kind in ("srh", "trh")}
        return f"SRH {rows['srh']}; TRH {rows['trh']}"

    off, both = (", ".join(map(str, counts)) for counts in (at.masked, at.masked_reading))
    measured = (
        f"Drop in exact match of {at.named} (from {np.mean(right[NOTHING]):.2f}; {at.masked_task}, {at.length} tokens, "
        f"n={n}) with the {off} best of {len(order['srh'])} heads off while decoding: "
        f"{drops(at.masked, DECODE)}; {both} of them while reading, too: {drops(at.masked_reading, BOTH)}; the "
        f"{most} heads of lowest SRH score off: {drop[CONTROL, most, DECODE]:.2f} and {drop[CONTROL, most, BOTH]:.2f}. "
        f"The two lists hold different heads at {differ or 'none'} of these."
    )
    told = why_masked(order, differ, gap)
    reason = "" if holds else told
    if drop[CONTROL, most, DECODE] >= drop["srh", most, DECODE]:
        holds = None
        reason = (
            f"Masking as many heads of the lowest scores hurts as much, so a drop does not show that the "
            f"masked heads retrieve. {told}"
        )
    figures = {
        "exact_match": [
            {"heads": arm[0], "off": arm[1], "when": arm[2], "mean": float(np.mean(v))} for arm, v in right.items()
        ],
        "gap": gap,
        "srh_order": order["srh"][:10],
        "trh_order": order["trh"][:10],
        "task": at.masked_task,
        "n": n,
    }
    says = "Masking the best semantic retrieval heads hurts retrieval far more than masking as many traditional ones."
    return Claim("compresskv", "CompressKV Table 2a, sec. 4.3", says, measured, holds, reason, figures)


def why_masked(order: dict[str, list[tuple[int, int]]], differ: list[int], gap: str) -> str:
    """What the masked heads show, in words. differ: numbers of heads off at which the two lists differ."""
    if not differ:
        return "Both rules rank the same heads first here, so masking cannot tell them apart."
    first = differ[0]
    lists = "; ".join(
        f"{kind.upper()} {', '.join(f'L{layer}H{head}' for layer, head in order[kind][:first])}"
        for kind in ("srh", "trh")
    )
    return (
        f"Where the lists differ, exact match with TRH off minus with SRH off (decoding) is {gap}. "
        f"The first {first}: {lists}."
    )


def decide(differences: np.ndarray) -> tuple[bool | None, str]:
    """Is the mean of these differences above 0? None when its 95 % interval holds 0; with the mean and interval in
    words."""
    mean, low, high = normal(differences.tolist(), FEWEST)
    verdict = None if low <= 0 <= high else mean > 0
    return verdict, f"{mean:+.3f} (95 % interval {low:+.3f} to {high:+.3f})"


# ------------------------------------------------------------------------------------------------ Tables 2b, 3a and 3b
BETTER = {True: "better than", False: "worse than", None: "not told apart from"}


def why(
    compared: list[tuple[str, str, bool | None]], mean: dict[str, float], kept: dict[str, float], full: float
) -> str:
    """Why a claim on the arms does not hold or cannot be decided. compared: (arm, other arm, is the first better?);
    kept: share of the answer's tokens that a layer keeps, by arm; full: the score with full KV."""
    said = "; ".join(f"{arm} {BETTER[verdict]} {other}" for arm, other, verdict in compared)
    names = dict.fromkeys(name for arm, other, _ in compared for name in (arm, other))
    shares = ", ".join(f"{name} {kept[name]:.2f}" for name in names)
    lost = (
        "what SRH loses is lost by the tokens chosen"
        if mean[HELD] >= full - SUFFICE
        else "more is lost than these tokens"
    )
    return (
        f"On these prompts: {said}. Of the answer's tokens a layer keeps, on average: {shares}. With these tokens held "
        f"for every KV head SRH scores {mean[HELD]:.3f}: {lost}."
    )


def _selection(found: Selected, at: Setting) -> list[Claim]:
    scores, prompts = found.score, found.full.shape[1]
    per_prompt = {name: values.mean((0, 1)) for name, values in scores.items()}
    mean = {name: float(values.mean()) for name, values in scores.items()}
    kept = {name: float(values.mean()) for name, values in found.kept.items()}
    of_all = " and ".join(f"{count / at.length:.1%}" for count in at.tokens)
    about = (
        f"mean score of {', '.join(at.tasks)} on {at.named} at {at.length} tokens, "
        f"{' and '.join(map(str, at.tokens))} kept per layer ({of_all}; the paper's 256 of up to 32K are 0.8 %), "
        f"preset {found.preset}, n={prompts} prompts each; full KV {found.full.mean():.3f}"
    )
    figures = {
        "mean": mean,
        "full": found.full.mean(1).round(4).tolist(),
        "kept_of_the_answer": kept,
        "by_task_and_tokens": {name: values.mean(2).round(4).tolist() for name, values in scores.items()},
        "kept_by_task_and_tokens": {name: values.mean(2).round(4).tolist() for name, values in found.kept.items()},
        "tasks": at.tasks,
        "tokens": at.tokens,
        "preset": found.preset,
        "n": prompts,
    }

    def step(better: str, than: str) -> tuple[bool | None, str]:
        return decide(per_prompt[better] - per_prompt[than])

    def claim(
        source: str, says: str, told: str, holds: bool | None, compared: list[tuple[str, str, bool | None]]
    ) -> Claim:
        reason = "" if holds else why(compared, mean, kept, float(found.full.mean()))
        return Claim("compresskv", source, says, f"{told}; {about}.", holds, reason, figures)

    selector, gain = step("SRH", "TRH")
    first, by_heads = step("SRH", "all heads")
    second, by_layers = step("SRH + layers", "SRH")
    both = False if False in (first, second) else True if first and second else None
    more = [decide(per_prompt[name] - per_prompt["SRH"]) for name in ("6 SRH", "all heads")]
    differences = [per_prompt[name] - per_prompt["SRH"] for name in ("6 SRH", "all heads")]
    uppers = [normal(d.tolist(), FEWEST)[2] for d in differences]
    enough = False if any(verdict for verdict, _ in more) else True if max(uppers) < SUFFICE else None
    counts = ", ".join(f"{name} {mean[name]:.3f}" for name in ("2 SRH", "SRH", "6 SRH", "all heads"))
    return [
        claim(
            "CompressKV Table 2b",
            "Semantic retrieval heads choose better tokens than traditional ones.",
            f"SRH {mean['SRH']:.3f}, TRH {mean['TRH']:.3f}, difference {gain}",
            selector,
            [("SRH", "TRH", selector)],
        ),
        claim(
            "CompressKV Table 3a",
            "Choosing by semantic retrieval heads improves on all heads, layer budgets improve it further.",
            f"all heads {mean['all heads']:.3f}, SRH {mean['SRH']:.3f} ({by_heads}), with layer budgets "
            f"{mean['SRH + layers']:.3f} "
            f"({by_layers})",
            both,
            [("SRH", "all heads", first), ("SRH + layers", "SRH", second)],
        ),
        claim(
            "CompressKV Table 3b",
            "Four heads per layer suffice: more bring nothing.",
            f"{counts} (SRH: 4 heads); gain over 4 of 6 {more[0][1]}, of all {more[1][1]}",
            enough,
            [("6 SRH", "SRH", more[0][0]), ("all heads", "SRH", more[1][0])],
        ),
    ]
