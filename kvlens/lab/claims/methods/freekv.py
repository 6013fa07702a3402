"""FreeKV's claims: how alike queries of adjacent steps are, how often heads are corrected, and what tau and the
group's pooling do for answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvlens.lab.claims import Claim, Test, setting_of
from kvlens.lab.claims.plan import FEWEST
from kvlens.methods.freekv.params import POOLINGS
from kvlens.methods.statements import Statement, arm
from kvlens.records import PrefillRecord, StepRecord
from kvlens.statistics import mean_interval
from kvlens.statistics.student import Sample, sample

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine

FIRST_SEED = 6_810_000
FED = 40
"""tokens that full KV generates at most"""
PAPER_LOWEST = 0.84
"""Fig. 3a: the mean similarity of every head exceeds it"""
PAPER_MEANS = (0.82, 0.92)
"""Table 8: smallest and largest mean of a model and a task, the first layer left out"""
LOW = 0.8
"""Fig. 3c, app. B.3: below it similarity has dropped; the paper's tau for long inputs"""

STATEMENTS = (
    Statement(
        "FreeKV app. B.3, Table 9",
        "A higher tau corrects more.",
        arm("freekv", "40%", tau=0.9),
        (arm("freekv", "40%", tau=0.8),),
        figure="corrected_share",
    ),
    Statement(
        "FreeKV Table 9",
        "Few heads are corrected at tau 0.8: 0.04 to 0.22.",
        arm("freekv", "40%", tau=0.8),
        verdict="within",
        figure="corrected_share",
        bounds=(0.04, 0.22),
    ),
    Statement(
        "FreeKV Table 9",
        "Not many more are corrected at tau 0.9: 0.17 to 0.52.",
        arm("freekv", "40%", tau=0.9),
        verdict="within",
        figure="corrected_share",
        bounds=(0.17, 0.52),
    ),
    Statement(
        "FreeKV app. B.3",
        "Max pooling of the similarity over a group triggers more corrections than mean pooling.",
        arm("freekv", "40%", tau=0.8, correction_pooling="max"),
        (arm("freekv", "40%", tau=0.8),),
        figure="corrected_share",
    ),
    Statement(
        "FreeKV Table 7",
        "Correction buys accuracy: tau 0.9 answers more than no correction.",
        arm("freekv", "40%", tau=0.9),
        (arm("freekv", "40%", tau=0.0),),
    ),
    Statement(
        "FreeKV Table 7",
        "Correction is enough: tau 0.9 answers as well as no speculation.",
        arm("freekv", "40%", tau=0.9),
        (arm("freekv", "40%", tau=1.0),),
        "as good",
    ),
    Statement(
        "FreeKV Table 5",
        "Of the six poolings the mean of the softmax over a group (MeanS) answers most.",
        arm("freekv", "40%", tau=1.0),
        tuple(arm("freekv", "40%", tau=1.0, pooling=name) for name in POOLINGS[1:]),
        tasks=("niah_single",),
    ),
)


class Cosines:
    """A sink that keeps the cosine of each head's query with that of the step before, [L, Hq] per step after the
    first."""

    def __init__(self) -> None:
        self.steps: list[np.ndarray] = []

    def prefill(self, record: PrefillRecord) -> None:
        """Keep nothing: the prompt has no steps."""

    def step(self, record: StepRecord) -> None:
        if record.step:
            self.steps.append(record.head["qcos"])


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """Check what the queries of full KV show in its own answers to prompts of each task."""
    from kvlens.engine.engine import Options
    from kvlens.lab.bench.trialprompts import Prompts
    from kvlens.methods.full import FullKV

    setting, make, cosines = setting_of(engine.loaded.name), Prompts(engine, FIRST_SEED), list[np.ndarray]()
    for task in setting.tasks:
        for index in range(prompts):
            _, prompt, read = make(task, setting.length, index)
            sink = Cosines()
            engine.run(prompt, FullKV, FullKV.Parameters(), None, Options(max_new=FED), sink, read=read)
            cosines += [np.stack(sink.steps)] if sink.steps else []
        report(f"freekv similarity: {task}, {prompts} prompts")
    about = f"{setting.about(prompts)}, up to {FED} tokens of full KV's own answer"
    steps = np.concatenate(cosines)
    return [
        every_head(steps, about),
        mean_of_model(cosines, about),
        first_layer(cosines, about),
        head_specific(steps, engine.loaded.shape.group, about),
    ]


def every_head(steps: np.ndarray, about: str) -> Claim:
    """Judge Fig. 3a. steps: cosines of all prompts' steps [N, L, Hq]."""
    mean = steps.mean(0)
    layer, head = np.unravel_index(mean.argmin(), mean.shape)
    below = (mean <= PAPER_LOWEST).sum(1)
    worst = ", ".join(
        f"{below[layer]} in layer {layer}" for layer in np.argsort(-below, kind="stable")[:3] if below[layer]
    )
    return Claim(
        "freekv",
        "FreeKV Fig. 3a",
        "The queries of adjacent steps are alike: the mean cosine of every head exceeds 0.84.",
        f"{mean.mean():.3f} over all heads, median head {np.median(mean):.3f}; "
        f"{(mean > PAPER_LOWEST).mean():.0%} of {mean.size} heads above {PAPER_LOWEST}; lowest {mean.min():.3f} (layer "
        f"{layer}, query head {head}); {len(steps)} steps, {about}.",
        not below.any(),
        f"{below.sum()} of {mean.size} heads do not, most of them: {worst}." if below.any() else "",
        {"mean_by_head": np.round(mean, 4).tolist()},
    )


def mean_of_model(cosines: Sequence[np.ndarray], about: str) -> Claim:
    """Judge Table 8. cosines: per prompt [N, L, Hq]; the first layer is left out."""
    means = [float(steps[:, 1:].mean()) for steps in cosines]
    mean, low, high = mean_interval(means)
    return Claim(
        "freekv",
        "FreeKV Table 8",
        "Similarity is near 0.9 whatever the model: 0.82 to 0.92 over all layers but the first.",
        f"{mean:.3f} ({low:.3f} to {high:.3f}, 95 % over {len(means)} prompts); {about}.",
        None,
        figures={"mean": mean, "interval": [low, high]},
        test=weigh_range(sample(means)),
    )


def weigh_range(means: Sample) -> Test:
    """Return what the prompts' means show for the paper's range and against it."""
    (low, high), reason = PAPER_MEANS, "The interval does not lie in the range of the paper's eight models."
    inside = max(means.exceeds(low), means.falls_below(high))
    outside = min(1.0, 2 * min(means.falls_below(low), means.exceeds(high)))
    return _test(means, inside, outside, reason)


def weigh_order(gaps: Sample, reason: str) -> Test:
    """Return what the gaps of the other layers over layer 0 show. gaps: one per prompt."""
    return _test(gaps, gaps.exceeds(0.0), gaps.falls_below(0.0), reason)


def _test(values: Sample, p_holds: float, p_fails: float, reason: str) -> Test:
    if values.n < FEWEST:
        p_holds = p_fails = 1.0
    return Test(values.n, p_holds, p_fails, None, reason, reason)


def first_layer(cosines: Sequence[np.ndarray], about: str) -> Claim:
    """Judge app. D by the difference of layer 0 from the other layers, prompt by prompt."""
    by_layer = np.concatenate(cosines).mean((0, 2))
    gaps = [float(steps[:, 1:].mean() - steps[:, 0].mean()) for steps in cosines]
    mean, low, high = mean_interval(gaps, FEWEST)
    lowest = ", ".join(f"{layer} ({by_layer[layer]:.2f})" for layer in np.argsort(by_layer, kind="stable")[:3])
    return Claim(
        "freekv",
        "FreeKV app. D",
        "Similarity is lower in the first layer than in the others.",
        f"Layer 0 {by_layer[0]:.3f}, the others {by_layer[1:].mean():.3f} on average; the others minus layer 0, by "
        f"prompt: {mean:+.3f} ({low:+.3f} to {high:+.3f}, 95 % over {len(cosines)} prompts); {about}.",
        None,
        figures={"mean_by_layer": np.round(by_layer, 4).tolist(), "interval": [low, high]},
        test=weigh_order(sample(gaps), f"The lowest layers are {lowest}."),
    )


def head_specific(steps: np.ndarray, group: int, about: str) -> Claim:
    """Judge Fig. 3c: at most steps some KV heads drop below LOW and others do not. group: query heads per KV head."""
    below = steps.reshape(len(steps), -1, group).mean(-1) < LOW
    mixed_share = float((below.any(1) & ~below.all(1)).mean())
    return Claim(
        "freekv",
        "FreeKV Fig. 3c",
        "Steps at which similarity drops differ between heads, so that corrections are worth making per head.",
        f"At {mixed_share:.0%} of {len(below)} steps some but not all KV heads are below {LOW}; {about}.",
        mixed_share > 0.5,
        "" if mixed_share > 0.5 else f"At {1 - mixed_share:.0%} of the steps all KV heads drop, or none.",
        {"share_of_steps_some_not_all": mixed_share},
    )
