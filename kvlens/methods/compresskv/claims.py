"""CompressKV's claims: what semantic retrieval heads are to the model (Table 2a, Fig. 9), and what they and the layer
budgets are worth when tokens are dropped (Tables 2b, 3a, 3b).

All arms answer the same prompts, so scores are compared prompt by prompt: a difference counts when the 95 % interval of
its mean (normal approximation over the prompts) leaves out 0; otherwise nothing is decided.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens.bench.claims import Claim

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine
    from kvlens.methods.compresskv.heads import HeadFigures

FIRST_SEED = 9_700_000
LENGTH = 2048
TASKS = ("needle", "multikey", "list")
TOKENS = (32, 64)
"""prompt tokens per layer: 1.6 and 3.1 % of the prompt (the paper: 256 of up to 32K)"""
MASKED = (1, 2, 4, 6)
"""heads switched off, best first (the paper: 10, 20, 30 of 1024)"""
ARMS: dict[str, dict[str, Any]] = {
    "all heads": {"heads": "all", "layers": "equal"},
    "TRH": {"heads": "trh", "layers": "equal"},
    "SRH": {"layers": "equal"},
    "SRH + layers": {},
    "2 SRH": {"layers": "equal", "top_heads": 2},
    "6 SRH": {"layers": "equal", "top_heads": 6},
}
"""'all heads' is SnapKV's rule with one token set per layer, and as many SRH as there are heads"""
NOTHING, CONTROL = ("none", 0, ""), "lowest SRH"
RETRIEVES = 2.0
"""ours: a head retrieves when it attends the answer this many times as much as attending all tokens alike would"""
FEWEST = 5
"""ours: fewer prompts decide nothing"""
SUFFICE = 0.05
"""ours: heads beyond four bring nothing when their mean gain in score lies below this with 95 % confidence"""


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """All of them, on `prompts` prompts per task; a model without a shipped calibration is calibrated first."""
    with tempfile.TemporaryDirectory() as folder:
        path = "" if engine.loaded.name == "demo" else _calibrate(engine, Path(folder) / "c.json", prompts, report)
        found = _load(engine, path)
        scores = _arms(engine, path, prompts, report)
        return [_zero_layers(found), _masking(engine, found, prompts, report), *_selection(scores, prompts)]


def _calibrate(engine: Engine, path: Path, prompts: int, report: Callable[[str], None]) -> str:
    from kvlens.methods.compresskv.calibrate import calibrate

    report("calibrating")
    return str(calibrate(engine.loaded, None, path, trials=max(prompts, 20), length=LENGTH))


def _load(engine: Engine, path: str) -> HeadFigures:
    from kvlens.methods.calibration import given
    from kvlens.methods.compresskv.method import CompressKV

    params = CompressKV.Parameters(calibration=path)
    found: HeadFigures = given(CompressKV, params, engine.loaded.shape, engine.loaded.name)["head scores"]
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Fig. 9
def _zero_layers(found: HeadFigures) -> Claim:
    srh, trh = np.array(found.scores["srh"]), np.array(found.scores["trh"])
    zero = [layer for layer in range(len(trh)) if trh[layer].max() == 0]
    best = {layer: float(srh[layer].max()) for layer in zero}
    chance = found.chance or math.nan
    says = "Layers in which no head passes the top-1 rule have semantic retrieval heads nonetheless."
    listed = ", ".join(f"layer {layer}: {value:.3f}" for layer, value in best.items()) or "there is none"
    measured = (
        f"Layers whose TRH scores are all 0, with their largest SRH score: {listed}. Attending all tokens "
        f"alike scores {chance:.3f}."
    )
    figures = {"trh_zero_layers": zero, "largest_srh": best, "chance": chance, "srh": srh.tolist(), "trh": trh.tolist()}
    holds = None if not zero else any(value > RETRIEVES * chance for value in best.values())
    reason = (
        ""
        if holds
        else "The model has no layer without a traditional retrieval head."
        if not zero
        else (
            "The scores there are above 0, as softmax weights always are, but no head attends the answer "
            "clearly more than attending all "
            "tokens alike would: these layers do not retrieve."
        )
    )
    return Claim("compresskv", "CompressKV Fig. 9, sec. 4.7", says, measured, holds, reason, figures)


# ----------------------------------------------------------------------------------------------------------------------
# Table 2a
def ranked(scores: list[list[float]]) -> list[tuple[int, int]]:
    """(layer, head), best first; ties by layer, then head."""
    pairs = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    return sorted(pairs, key=lambda at: (-scores[at[0]][at[1]], at))


def _masking(engine: Engine, found: HeadFigures, prompts: int, report: Callable[[str], None]) -> Claim:
    from kvlens.bench.trials import NEW_TOKENS, Prompts
    from kvlens.calibrate.projection import heads_off
    from kvlens.demo.tasks import score
    from kvlens.engine.engine import Options
    from kvlens.methods.full import FullKV

    task, make = "multikey", Prompts(engine, FIRST_SEED)
    order = {kind: ranked(found.scores[kind]) for kind in ("srh", "trh")}
    order[CONTROL] = order["srh"][::-1]
    right: dict[tuple[str, int, str], list[float]] = {}

    def ask(arm: tuple[str, int, str], prompt: Any, answer: str, read: Any) -> None:
        out = engine.run(prompt, FullKV, FullKV.Parameters(), None, Options(max_new=NEW_TOKENS[task]), read=read)
        right.setdefault(arm, []).append(score(task, answer, out.text))

    for index in range(prompts):
        source, prompt, read = make(task, LENGTH, index)
        ask(NOTHING, prompt, source.answer, read)
        for kind, heads in order.items():
            for count in MASKED if kind != CONTROL else MASKED[-1:]:
                with heads_off(engine.loaded, heads[:count]):
                    ask((kind, count, "decode"), prompt, source.answer, read)
                    ask((kind, count, "prefill and decode"), prompt, source.answer, None)
        report(f"compresskv masking: prompt {index + 1} of {prompts}")
    drop = {arm: float(np.mean(right[NOTHING]) - np.mean(values)) for arm, values in right.items()}
    differ = [count for count in MASKED if set(order["srh"][:count]) != set(order["trh"][:count])]
    gaps = [np.array(right["trh", count, "decode"]) - np.array(right["srh", count, "decode"]) for count in differ]
    holds, gap = decide(np.mean(gaps, axis=0)) if differ else (None, "")
    drops = {}
    for when in ("decode", "prefill and decode"):
        rows = {kind: ", ".join(f"{drop[kind, count, when]:.2f}" for count in MASKED) for kind in ("srh", "trh")}
        drops[when] = f"SRH {rows['srh']}; TRH {rows['trh']}"
    measured = (
        f"Drop in exact match (from {np.mean(right[NOTHING]):.2f}; {task}, {LENGTH} tokens, n={prompts}) with "
        f"the {MASKED} best of "
        f"{len(order['srh'])} heads off while decoding: {drops['decode']}; while reading too: "
        f"{drops['prefill and decode']}; the "
        f"{MASKED[-1]} heads of lowest SRH score off: {drop[CONTROL, MASKED[-1], 'decode']:.2f} and "
        f"{drop[CONTROL, MASKED[-1], 'prefill and decode']:.2f}. The two lists hold different heads at "
        f"{differ or 'none'} of these."
    )
    same = "Both rules rank the same heads first here, so masking cannot tell them apart."
    told = (
        f"Where the lists differ, exact match with TRH off minus with SRH off (decoding) is {gap}." if differ else same
    )
    reason = "" if holds else told
    if drop[CONTROL, MASKED[-1], "decode"] >= drop["srh", MASKED[-1], "decode"]:
        holds = None
        reason = (
            f"Masking as many heads of the lowest scores hurts as much, so a drop does not show that the "
            f"masked heads retrieve. {told}"
        )
    figures = {
        "exact_match": [
            {"heads": arm[0], "off": arm[1], "when": arm[2], "mean": float(np.mean(v))} for arm, v in right.items()
        ],
        "srh_order": order["srh"][:10],
        "trh_order": order["trh"][:10],
        "n": prompts,
    }
    says = "Masking the best semantic retrieval heads hurts retrieval far more than masking as many traditional ones."
    return Claim("compresskv", "CompressKV Table 2a, sec. 4.3", says, measured, holds, reason, figures)


# ------------------------------------------------------------------------------------------------------------- Tables
# 2b, 3a and 3b
def _arms(engine: Engine, path: str, prompts: int, report: Callable[[str], None]) -> dict[str, np.ndarray]:
    """Arm -> score per (task, budget, prompt): exact match, for lists the share of entries."""
    from kvlens import methods
    from kvlens.bench.trials import NEW_TOKENS, Prompts
    from kvlens.demo.tasks import score
    from kvlens.engine.engine import Options
    from kvlens.methods.compresskv.method import CompressKV
    from kvlens.runs.request import default_preset

    make, preset = Prompts(engine, FIRST_SEED), default_preset("compresskv", engine.loaded.name)
    out = {name: np.zeros((len(TASKS), len(TOKENS), prompts)) for name in ARMS}
    for index in range(prompts):
        for t, task in enumerate(TASKS):
            source, prompt, read = make(task, LENGTH, index)
            for b, tokens in enumerate(TOKENS):
                for name, overrides in ARMS.items():
                    params = methods.make_parameters(
                        CompressKV, preset, {**overrides, "tokens": tokens, "calibration": path}
                    )
                    result = engine.run(prompt, CompressKV, params, None, Options(max_new=NEW_TOKENS[task]), read=read)
                    out[name][t, b, index] = score(task, source.answer, result.text)
        report(f"compresskv selection: prompt {index + 1} of {prompts}")
    return out


def half_width(differences: np.ndarray) -> float:
    """Of the 95 % interval of their mean; infinite for fewer than FEWEST."""
    return (
        1.96 * float(differences.std(ddof=1)) / math.sqrt(differences.size) if differences.size >= FEWEST else math.inf
    )


def decide(differences: np.ndarray) -> tuple[bool | None, str]:
    """Is the mean of these differences above 0? None when its 95 % interval holds 0; with the mean and interval in
    words."""
    mean = float(differences.mean())
    half = half_width(differences)
    verdict = None if abs(mean) <= half else mean > 0
    return verdict, f"{mean:+.3f} (95 % interval {mean - half:+.3f} to {mean + half:+.3f})"


def _selection(scores: dict[str, np.ndarray], prompts: int) -> list[Claim]:
    per_prompt = {name: values.mean((0, 1)) for name, values in scores.items()}
    mean = {name: float(values.mean()) for name, values in scores.items()}
    about = (
        f"mean score of {', '.join(TASKS)} at {LENGTH} tokens, {' and '.join(map(str, TOKENS))} kept per "
        f"layer, n={prompts} prompts each"
    )
    figures = {
        "mean": mean,
        "by_task_and_tokens": {name: values.mean(2).round(4).tolist() for name, values in scores.items()},
        "tasks": TASKS,
        "tokens": TOKENS,
        "n": prompts,
    }

    def step(better: str, than: str) -> tuple[bool | None, str]:
        return decide(per_prompt[better] - per_prompt[than])

    unsure = "The difference is within what this many prompts can show."

    def claim(source: str, says: str, found: str, holds: bool | None) -> Claim:
        reason = "" if holds else unsure if holds is None else "The difference goes the other way here."
        return Claim("compresskv", source, says, f"{found}; {about}.", holds, reason, figures)

    selector, gain = step("SRH", "TRH")
    first, by_heads = step("SRH", "all heads")
    second, by_layers = step("SRH + layers", "SRH")
    both = False if False in (first, second) else True if first and second else None
    more = [decide(per_prompt[name] - per_prompt["SRH"]) for name in ("6 SRH", "all heads")]
    differences = [per_prompt[name] - per_prompt["SRH"] for name in ("6 SRH", "all heads")]
    uppers = [float(d.mean()) + half_width(d) for d in differences]
    enough = False if any(verdict for verdict, _ in more) else True if max(uppers) < SUFFICE else None
    counts = ", ".join(f"{name} {mean[name]:.3f}" for name in ("2 SRH", "SRH", "6 SRH", "all heads"))
    return [
        claim(
            "CompressKV Table 2b",
            "Semantic retrieval heads choose better tokens than traditional ones.",
            f"SRH {mean['SRH']:.3f}, TRH {mean['TRH']:.3f}, difference {gain}",
            selector,
        ),
        claim(
            "CompressKV Table 3a",
            "Choosing by semantic retrieval heads improves on all heads, layer budgets improve it further.",
            f"all heads {mean['all heads']:.3f}, SRH {mean['SRH']:.3f} ({by_heads}), with layer budgets "
            f"{mean['SRH + layers']:.3f} "
            f"({by_layers})",
            both,
        ),
        claim(
            "CompressKV Table 3b",
            "Four heads per layer suffice: more bring nothing.",
            f"{counts} (SRH: 4 heads); gain over 4 of 6 {more[0][1]}, of all {more[1][1]}",
            enough,
        ),
    ]
