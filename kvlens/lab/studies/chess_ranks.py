"""Does CHESS's score find the pages that hold what is asked for? `python -m kvlens.lab.studies.chess_ranks [--prompts
N] [--out FILE]`.

First selections on the demo model, 2048 tokens: rank of the asked pages among the candidates under the published score
and its variants, and the part of them that was kept at 20 % attended.

It is no study of kvlens.studies: it reads the ranks of pages inside the first selection.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvlens.demo.tasks import make_prompt
from kvlens.engine.engine import Engine
from kvlens.engine.models import load
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.claims.methods.chess_pages import Ranges, Ranked, first_selection, rank_asked, rank_by_parts
from kvlens.models.device import machine
from kvlens.statistics import mean_interval
from kvlens.text.prompts import Prompt, PromptText, tokenize

LENGTH, FIRST_SEED, NEW = 2048, 6_500_000, 128
TASKS = (("needle", 1), ("multikey", 1), ("list", 12), ("chain", 6), ("note", 1))
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "keys=unrotated": {"keys": "unrotated"},
    "scale=layer": {"scale": "layer"},
    "keys=unrotated, scale=layer": {"keys": "unrotated", "scale": "layer"},
    "anchor_tail": {"anchor_tail": True},
    "keys=unrotated, anchor_tail": {"keys": "unrotated", "anchor_tail": True},
    "window_pages=2": {"window_pages": 2},
    "page=16": {"page": 16, "window_pages": 2},
}
KEEP = 0.2
PARTS = ("part in common alone", "part of its own alone")
"""not settings of the method: the two parts of its score, each ranked by itself"""


def make(engine: Engine, task: str, size: int, index: int) -> tuple[Prompt, ReadPrompt, Ranges]:
    """Return prompt `index` of a task of the demo language, what was read of it, and where its asked facts are."""
    tokenizer = engine.loaded.tokenizer

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    source = make_prompt(task, LENGTH, (index % 5) / 4, FIRST_SEED + index, encode, items=size, hops=size)
    prompt = tokenize(PromptText(source.text), tokenizer, engine.loaded.max_positions, NEW)
    return prompt, engine.read(prompt), source.needle


def measure(engine: Engine, prompts: int) -> list[dict[str, Any]]:
    """One row per variant: mean normalised rank (0 best, 0.5 chance) with its interval, share kept, without hierarchy,
    chance, n."""
    ranked_by: dict[str, list[Ranked]] = {name: [] for name in (*VARIANTS, *PARTS)}
    for index in range(prompts):
        for task, size in TASKS:
            prompt, read, needle = make(engine, task, size, index)
            for name, overrides in VARIANTS.items():
                overrides_used = {"keep": KEEP, "trigger": "never", **overrides}
                selection, page = first_selection(engine, prompt, read, overrides_used, "demo")
                ranked_by[name] += rank_asked(prompt, needle, selection, page)
                if not VARIANTS[name]:
                    for part, ranked in zip(PARTS, rank_by_parts(prompt, needle, read, selection, page), strict=True):
                        ranked_by[part] += ranked
    rows = []
    for name, ranks in ranked_by.items():
        mean, low, high = mean_interval([r["rank"] for r in ranks])
        row = {"variant": name, "rank": mean, "low": low, "high": high, "n": len(ranks)}
        rows.append(row | {key: float(np.mean([r[key] for r in ranks])) for key in ("kept", "flat", "chance")})
    return rows


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("kvlens/lab/results/chess_ranks.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(Engine(load("demo")), options.prompts)
    about = {
        "model": "demo",
        "length": LENGTH,
        "keep": KEEP,
        "tasks": [task for task, _ in TASKS],
        "prompts": options.prompts,
        "torch": torch.__version__,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for r in rows:
        shares = f"{r['kept']:.0%} | {r['flat']:.0%} | {r['chance']:.0%}"
        print(f"| {r['variant']} | {r['rank']:.2f} ({r['low']:.2f}-{r['high']:.2f}) | {shares} | {r['n']} |")


if __name__ == "__main__":
    main()
