"""FreeKV's claims: how alike queries of adjacent steps are, how often that leads to corrections, and what tau and the
group's pooling do for accuracy. Every arm reads the same right answers token by token, so that all arms see the same
queries' steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from kvlens.bench.claims import Claim
from kvlens.bench.intervals import sign_test
from kvlens.bench.rates import corrected
from kvlens.bench.trials import Prompts
from kvlens.engine.engine import Engine, Options
from kvlens.memory.budget import Budget
from kvlens.methods import get, make_parameters
from kvlens.methods.freekv.params import POOLINGS
from kvlens.rows import PrefillRecord, StepRecord

LENGTH = 2048
FIRST_SEED = 6_800_000
BUDGET = "20%"
TASKS = ("multikey", "chain", "note", "list")
TAUS = (0.0, 0.7, 0.8, 0.9, 1.0)
PAPER_LOWEST = 0.84
"""Fig. 3a: the mean similarity of every head exceeds it"""
PAPER_RATES = {0.8: (0.04, 0.22), 0.9: (0.17, 0.52)}
"""Table 9: smallest and largest correction rate"""
SIGNIFICANT = 0.05


@dataclass
class Seen:
    """One right answer fed to one arm. A sink."""

    right: float = 0.0
    """share of its tokens that were the most likely ones; 1: greedy decoding gives this answer"""
    qcos: list[np.ndarray] = field(default_factory=list)
    """per step after the first [L, Hq]"""
    corrected: list[float] = field(default_factory=list)
    blocking: float = 0.0
    moved: float = 0.0
    """bytes to the device after the first step, of them blocking"""

    def prefill(self, record: PrefillRecord) -> None:
        """Nothing to keep."""

    def step(self, record: StepRecord) -> None:
        if record.step == 0:
            return
        self.qcos.append(record.head["qcos"])
        self.moved += float(record.kv["h2d_bytes"].sum())
        self.blocking += float(record.kv["blocking_bytes"].sum())
        if "corrected" in record.head:
            waited, heads = corrected(record)
            self.corrected.append(waited / heads)


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """`prompts` prompts of each task. FullKV tells of the similarity, FreeKV's arms of everything else."""
    arms: dict[str, dict[str, Any]] = {f"tau={tau:g}": {"tau": tau} for tau in TAUS}
    arms |= {pooling: {"pooling": pooling, "tau": 1.0} for pooling in POOLINGS[1:]}
    seen: dict[str, list[Seen]] = {name: [] for name in ("full", *arms)}
    made = Prompts(engine, FIRST_SEED)
    for task in TASKS:
        for index in range(prompts):
            seen["full"].append(_feed(engine, made, task, index, "full", {}))
            for name, changes in arms.items():
                seen[name].append(_feed(engine, made, task, index, "freekv", changes))
        report(f"freekv: {task}, {prompts} prompts, {len(seen)} arms")
    about = f"{prompts} prompts of each of {', '.join(TASKS)}, {LENGTH} tokens"
    group = engine.loaded.shape.group
    similarity = np.concatenate([np.stack(trial.qcos) for trial in seen["full"]])
    return [
        *_similarity(similarity, about),
        _head_specific(similarity, group, about),
        _max_pooling(similarity, group, about),
        *_rates({tau: seen[f"tau={tau:g}"] for tau in TAUS}, about),
        _accuracy({tau: seen[f"tau={tau:g}"] for tau in TAUS}, about),
        _poolings({"MeanS": seen["tau=1"], **{name: seen[name] for name in POOLINGS[1:]}}, about),
    ]


def _feed(engine: Engine, made: Prompts, task: str, index: int, name: str, changes: dict[str, Any]) -> Seen:
    source, prompt, read = made(task, LENGTH, index)
    answer = tuple(engine.loaded.tokenizer.encode(source.answer, add_special_tokens=False))
    method = get(name)
    params = make_parameters(method, "demo" if name == "freekv" else None, changes)
    limit = Budget.parse(BUDGET) if name == "freekv" else None
    trial = Seen()
    result = engine.run(prompt, method, params, limit, Options(forced=answer), trial, keep_logits=True, read=read)
    trial.right = float(
        np.mean([int(logits.argmax()) == token for logits, token in zip(result.logits, answer, strict=True)])
    )
    return trial


def _similarity(cosine: np.ndarray, about: str) -> list[Claim]:
    """`cosine` [steps of all prompts, L, Hq] under FullKV."""
    mean = cosine.mean(0)
    share = float((mean > PAPER_LOWEST).mean())
    first, others = float(mean[0].mean()), float(mean[1:].mean())
    low = np.unravel_index(mean.argmin(), mean.shape)
    high = Claim(
        "freekv",
        "FreeKV Fig. 3a, Table 8",
        "The queries of adjacent steps are alike: the mean cosine of every head exceeds 0.84.",
        f"{mean.mean():.3f} over all heads, layer 0 left out {others:.3f}; {share:.0%} of {mean.size} heads "
        f"above {PAPER_LOWEST}; lowest "
        f"{mean.min():.3f} (layer {low[0]}, query head {low[1]}); {len(cosine)} steps, {about}.",
        bool(share == 1),
        ""
        if share == 1
        else "The model looks facts up; in the demo model it is the heads that retrieve (layer 2) "
        "whose queries turn most, so speculation is under more strain here than in the paper.",
        {"mean_by_head": np.round(mean, 4).tolist()},
    )
    lower = Claim(
        "freekv",
        "FreeKV app. D",
        "Similarity is lower in the first layer than in the others.",
        f"layer 0 {first:.3f}, the others {others:.3f} on average ({', '.join(f'{x:.2f}' for x in mean[1:].mean(1))}).",
        bool(first < others),
        "" if first < others else "In the demo model the layers that retrieve, and those after them, are the lowest.",
        {"mean_by_layer": np.round(mean.mean(1), 4).tolist()},
    )
    return [high, lower]


def _pooled(cosine: np.ndarray, group: int) -> np.ndarray:
    """[N, L, Hq] -> [N, L, H_kv, G]."""
    return cosine.reshape(*cosine.shape[:2], -1, group)


def _head_specific(cosine: np.ndarray, group: int, about: str) -> Claim:
    below = _pooled(cosine, group).mean(-1) < 0.8
    flat = below.reshape(len(below), -1)
    some = float((flat.any(1) & ~flat.all(1)).mean())
    return Claim(
        "freekv",
        "FreeKV Fig. 3c",
        "Steps at which similarity drops differ between heads, so that corrections are worth making per head.",
        f"At {some:.0%} of {len(below)} steps some but not all KV heads are below 0.8; {about}.",
        some > 0.5,
        figures={"share_of_steps_some_not_all": round(some, 4)},
    )


def _max_pooling(cosine: np.ndarray, group: int, about: str) -> Claim:
    pooled = _pooled(cosine, group)
    rates = {
        name: float((how(-1) < 0.8).mean())
        for name, how in (("mean", pooled.mean), ("max", pooled.max), ("min", pooled.min))
    }
    return Claim(
        "freekv",
        "FreeKV app. B.3",
        "Max pooling of the similarity over a group triggers more corrections than mean pooling.",
        (
            f"Below 0.8: mean {rates['mean']:.3f}, max {rates['max']:.3f}, min {rates['min']:.3f} of (step, layer, "
            f"KV head); {about}."
        ),
        rates["max"] > rates["mean"],
        "The largest of several cosines is never below their mean, so max pooling can only trigger fewer; the "
        "text fits pooling by the "
        "smallest (the largest deviation).",
        {name: round(rate, 4) for name, rate in rates.items()},
    )


def _rates(trials: dict[float, list[Seen]], about: str) -> list[Claim]:
    rate = {tau: float(np.mean([np.mean(t.corrected) for t in seen])) for tau, seen in trials.items()}
    waited = {tau: sum(t.blocking for t in seen) / max(1.0, sum(t.moved for t in seen)) for tau, seen in trials.items()}
    listed = ", ".join(f"{tau:g}: {rate[tau]:.3f}" for tau in TAUS)
    rising = all(rate[a] <= rate[b] for a, b in pairwise(TAUS)) and rate[0.0] == 0 and rate[1.0] == 1
    inside = all(low <= rate[tau] <= high for tau, (low, high) in PAPER_RATES.items())
    figures = {
        "rate": {str(tau): round(x, 4) for tau, x in rate.items()},
        "blocking_share_of_bytes": {str(tau): round(x, 4) for tau, x in waited.items()},
    }
    return [
        Claim(
            "freekv",
            "FreeKV app. B.3, Table 9",
            "A higher tau corrects more.",
            f"Correction rate at tau {listed}; share of bytes waited for "
            f"{', '.join(f'{t:g}: {x:.3f}' for t, x in waited.items())} "
            f"(step 0 left out); {about}.",
            rising,
            figures=figures,
        ),
        Claim(
            "freekv",
            "FreeKV Table 9",
            "Few heads are corrected: 0.04 to 0.22 at tau 0.8, 0.17 to 0.52 at tau 0.9.",
            f"{rate[0.8]:.3f} at 0.8 and {rate[0.9]:.3f} at 0.9; {about}.",
            inside,
            "" if inside else "Follows from the similarity of the demo model's queries above.",
        ),
    ]


def _paired(a: list[Seen], b: list[Seen]) -> tuple[float, float]:
    """(mean difference of a over b, p of the sign test over prompts)."""
    pairs = [(x.right, y.right) for x, y in zip(a, b, strict=True)]
    return float(np.mean([x - y for x, y in pairs])), sign_test(
        sum(x > y for x, y in pairs), sum(x < y for x, y in pairs)
    )


def _accuracy(trials: dict[float, list[Seen]], about: str) -> Claim:
    right = {tau: float(np.mean([t.right for t in seen])) for tau, seen in trials.items()}
    exact = {tau: float(np.mean([t.right == 1 for t in seen])) for tau, seen in trials.items()}
    gain, p = _paired(trials[0.9], trials[0.0])
    holds = None if p > SIGNIFICANT else gain > 0
    return Claim(
        "freekv",
        "FreeKV Table 7",
        "Correction buys accuracy: tau 0.9 answers better than no correction, and as well as no speculation.",
        f"Right tokens of the answer at tau {', '.join(f'{t:g}: {x:.3f}' for t, x in right.items())}; whole answers "
        f"{', '.join(f'{t:g}: {x:.2f}' for t, x in exact.items())}; 0.9 against 0: {gain:+.3f}, p {p:.3g} "
        f"(sign test over prompts); "
        f"0.9 against 1: {_paired(trials[0.9], trials[1.0])[0]:+.3f}; {about}, budget {BUDGET}.",
        holds,
        "" if holds else "The difference is within chance." if holds is None else "Correction did not help here.",
        {
            "right": {str(t): round(x, 4) for t, x in right.items()},
            "exact": {str(t): round(x, 4) for t, x in exact.items()},
        },
    )


def _poolings(trials: dict[str, list[Seen]], about: str) -> Claim:
    right = {name: float(np.mean([t.right for t in seen])) for name, seen in trials.items()}
    best = max(right, key=lambda name: right[name])
    against = {name: _paired(trials["MeanS"], seen) for name, seen in trials.items() if name != "MeanS"}
    worse = [name for name, (gain, p) in against.items() if gain < 0 and p <= SIGNIFICANT]
    holds = False if worse else True if all(gain > 0 and p <= SIGNIFICANT for gain, p in against.values()) else None
    reason = (
        ""
        if holds
        else f"{', '.join(worse)} is better here."
        if worse
        else "Some of the differences are within chance."
    )
    return Claim(
        "freekv",
        "FreeKV Table 5",
        "Of the six poolings the mean of the softmax over a group (MeanS) answers best.",
        f"Right tokens without speculation: {', '.join(f'{name} {x:.3f}' for name, x in right.items())}; best "
        f"{best}; MeanS against the "
        f"others: {', '.join(f'{name} {g:+.3f} (p {p:.2g})' for name, (g, p) in against.items())}; {about}, "
        f"budget {BUDGET}.",
        holds,
        reason,
        {"right": {name: round(x, 4) for name, x in right.items()}},
    )
