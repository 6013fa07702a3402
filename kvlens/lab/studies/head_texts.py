"""Whether a map of retrieval heads depends on the text that its needles were hidden in.

    python -m kvlens.lab.studies.head_texts [--prompts N] [--length TOKENS] [--model MODEL] [--out FILE]

The needle scores of `kvlens calibrate heads` are measured three times on the same number of prompts: in the text that
methods are measured on, as the shipped map was (`kvlens/tasks/texts.py`: EVALUATION); in it again with other seeds,
which is how far the ranking moves by chance; and in the text kept for calibrations (CALIBRATION), which methods are
never measured on. Each is compared with the first and with the shipped map: Spearman's rank correlation over all query
heads, and how many of the best are the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import torch

from kvlens.engine.models import load
from kvlens.lab.bench.provenance import about
from kvlens.lab.calibrate.copying import FIRST_SEED, needle_scores
from kvlens.methods.families.retrieval_heads import SHIPPED
from kvlens.models.find import default_model
from kvlens.tasks.layout import Content
from kvlens.tasks.needles import Needle
from kvlens.tasks.texts import CALIBRATION, EVALUATION, Text, sentences

OTHER_SEEDS = FIRST_SEED + 10_000
BEST = (5, 10, 20)


class NeedleIn(Needle):
    """niah_single in a text of its own."""

    def __init__(self, text: Text) -> None:
        super().__init__("niah_single", "needle", f"one number in {text.title}", keys=1, values=1, others=0)
        self.text = text

    def haystack(self, content: Content, length: int, rng: Random) -> Sequence[str]:
        return sentences(self.text)


def spearman(values: np.ndarray, counterpart: np.ndarray) -> float:
    """Rank correlation of two lists of scores [n]; equal ones share the mean of their ranks."""
    return float(np.corrcoef(pd.Series(values).rank(), pd.Series(counterpart).rank())[0, 1])


def alike(values: np.ndarray, counterpart: np.ndarray) -> dict[str, float]:
    """`rank`: Spearman's correlation; `bestK`: how many of the K best are the same."""
    shared = {f"best{k}": len({*np.argsort(-values)[:k]} & {*np.argsort(-counterpart)[:k]}) for k in BEST}
    return {"rank": spearman(values, counterpart), **shared}


def measure(model: str, prompts: int, length: int) -> dict[str, Any]:
    """Scores [L x Hq] of each arm, and how alike they are."""
    torch.set_num_threads(1)
    loaded = load(model)
    arms = {
        "evaluation": (EVALUATION, FIRST_SEED),
        "evaluation, other prompts": (EVALUATION, OTHER_SEEDS),
        "calibration": (CALIBRATION, FIRST_SEED),
    }
    scores: dict[str, np.ndarray] = {}
    for name, (text, seed) in arms.items():
        results, _ = needle_scores(loaded, prompts, length, NeedleIn(text), seed)
        scores[name] = results.flatten().numpy()
    shipped = json.loads((SHIPPED / f"heads_{model}.json").read_text(encoding="utf-8"))
    scores["shipped"] = np.array(shipped["needle"]).flatten()
    pairs = [(name, against) for name in arms for against in ("evaluation", "shipped") if name != against]
    return {
        "about": about((), model) | {"model": model, "prompts": prompts, "length": length},
        "alike": [
            {"of": name, "with": counterpart, **alike(scores[name], scores[counterpart])} for name, counterpart in pairs
        ],
        "scores": {name: [round(float(x), 6) for x in total] for name, total in scores.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = measure(options.model, options.prompts, options.length)
    for line in results["alike"]:
        best = ", ".join(f"{line[f'best{k}']} of the {k} best" for k in BEST)
        print(f"{line['of']:28} with {line['with']:12} rank correlation {line['rank']:.3f}; {best}")
    if options.out:
        options.out.write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
