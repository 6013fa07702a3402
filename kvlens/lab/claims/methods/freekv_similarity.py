"""What FreeKV's paper says of the queries of adjacent steps, judged on FullKV's. Per prompt [steps after the first, L,
Hq] cosines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlens.lab.claims import Claim
from kvlens.lab.claims.methods.freekv_cases import Case
from kvlens.statistics import normal

PAPER_LOWEST = 0.84
"""Fig. 3a: the mean similarity of every head exceeds it"""
PAPER_MEANS = (0.82, 0.92)
"""Table 8: smallest and largest mean of a model and a task, the first layer left out"""
LOW = 0.8
"""Fig. 3c, app. B.3: what a drop is, the paper's tau for long inputs"""


def of_similarity(case: Case, cosines: Sequence[np.ndarray], group: int, about: str) -> list[Claim]:
    """All claims that need nothing but FullKV's queries."""
    return [
        every_head(case, np.concatenate(cosines), about),
        mean_of_model(cosines, about),
        first_layer(cosines, about),
        head_specific(np.concatenate(cosines), group, about),
        max_pooling(np.concatenate(cosines), group, about),
    ]


def every_head(case: Case, cosine: np.ndarray, about: str) -> Claim:
    """Fig. 3a. cosine: of all prompts' steps."""
    mean = cosine.mean(0)
    share = float((mean > PAPER_LOWEST).mean())
    low = np.unravel_index(mean.argmin(), mean.shape)
    below = (mean <= PAPER_LOWEST).sum(1)
    most = sorted(np.argsort(-below, kind="stable")[:3].tolist())
    where = ", ".join(f"{below[layer]} in layer {layer}" for layer in most if below[layer])
    others = " among them" if below.sum() > below[most].sum() else ""
    reason = f"{int(below.sum())} of {mean.size} heads do not: {where}{others}."
    return Claim(
        "freekv",
        "FreeKV Fig. 3a",
        "The queries of adjacent steps are alike: the mean cosine of every head exceeds 0.84.",
        f"{mean.mean():.3f} over all heads, median head {np.median(mean):.3f}; {share:.0%} of {mean.size} heads "
        f"above {PAPER_LOWEST}, {(mean > 0.9).mean():.0%} above 0.9; lowest {mean.min():.3f} (layer {low[0]}, query "
        f"head {low[1]}); {len(cosine)} steps, {about}.",
        bool(share == 1),
        "" if share == 1 else " ".join(part for part in (reason, case.turning) if part),
        {"mean_by_head": np.round(mean, 4).tolist()},
    )


def mean_of_model(cosines: Sequence[np.ndarray], about: str) -> Claim:
    """Table 8: the mean over layers and steps, the first layer left out."""
    by_prompt = [float(one[:, 1:].mean()) for one in cosines]
    _, low, high = normal(by_prompt)
    least, most = PAPER_MEANS
    holds = True if least <= low and high <= most else False if high < least or most < low else None
    side = "below" if high < least else "above"
    return Claim(
        "freekv",
        "FreeKV Table 8",
        "Similarity is near 0.9 whatever the model: 0.82 to 0.92 over all layers but the first.",
        f"{np.mean(by_prompt):.3f} ({low:.3f} to {high:.3f}, 95 % over {len(by_prompt)} prompts); {about}.",
        holds,
        ""
        if holds
        else "The interval reaches over an end of the paper's range."
        if holds is None
        else f"It lies {side} all that the paper's eight models have.",
        {"mean": round(float(np.mean(by_prompt)), 4), "interval": [round(low, 4), round(high, 4)]},
    )


def first_layer(cosines: Sequence[np.ndarray], about: str) -> Claim:
    """App. D."""
    by_layer = np.concatenate(cosines).mean((0, 2))
    less = [float(one[:, 1:].mean() - one[:, 0].mean()) for one in cosines]
    _, low, high = normal(less)
    lowest = np.argsort(by_layer, kind="stable")[:3]
    holds = True if low > 0 else False if high < 0 else None
    return Claim(
        "freekv",
        "FreeKV app. D",
        "Similarity is lower in the first layer than in the others.",
        f"Layer 0 {by_layer[0]:.3f} over all steps, the others {by_layer[1:].mean():.3f} on average "
        f"({by_layer[1:].min():.3f} to {by_layer[1:].max():.3f}); the others differ from it, by prompt, by "
        f"{np.mean(less):+.3f} ({low:+.3f} to {high:+.3f}, 95 % over {len(less)} prompts); {about}.",
        holds,
        ""
        if holds
        else f"The lowest layers are {', '.join(f'{at} ({by_layer[at]:.2f})' for at in lowest)}."
        if holds is False
        else "The interval of the difference holds 0.",
        {"mean_by_layer": np.round(by_layer, 4).tolist(), "interval": [round(low, 4), round(high, 4)]},
    )


def _pooled(cosine: np.ndarray, group: int) -> np.ndarray:
    """[N, L, Hq] -> [N, L, H_kv, G]."""
    return cosine.reshape(*cosine.shape[:2], -1, group)


def head_specific(cosine: np.ndarray, group: int, about: str) -> Claim:
    """Fig. 3c."""
    below = _pooled(cosine, group).mean(-1) < LOW
    flat = below.reshape(len(below), -1)
    some = float((flat.any(1) & ~flat.all(1)).mean())
    return Claim(
        "freekv",
        "FreeKV Fig. 3c",
        "Steps at which similarity drops differ between heads, so that corrections are worth making per head.",
        f"At {some:.0%} of {len(below)} steps some but not all KV heads are below {LOW}; {about}.",
        some > 0.5,
        "" if some > 0.5 else f"At {1 - some:.0%} of the steps all of them are, or none.",
        figures={"share_of_steps_some_not_all": round(some, 4)},
    )


def max_pooling(cosine: np.ndarray, group: int, about: str) -> Claim:
    """App. B.3."""
    pooled = _pooled(cosine, group)
    rates = {
        name: float((how(-1) < LOW).mean())
        for name, how in (("mean", pooled.mean), ("max", pooled.max), ("min", pooled.min))
    }
    return Claim(
        "freekv",
        "FreeKV app. B.3",
        "Max pooling of the similarity over a group triggers more corrections than mean pooling.",
        f"Below {LOW}: mean {rates['mean']:.3f}, max {rates['max']:.3f}, min {rates['min']:.3f} of (step, layer, KV "
        f"head); {about}.",
        rates["max"] > rates["mean"],
        "The largest of several cosines is never below their mean, so max pooling can only trigger fewer; the text "
        "fits pooling by the smallest (the largest deviation).",
        {name: round(rate, 4) for name, rate in rates.items()},
    )
