"""Does CHESS's score find the pages that hold what is asked for? `python -m kvlens.lab.studies.chess_ranks [--prompts
N] [--out FILE]`.

First selections on the demo model, 2048 tokens: rank of the asked pages among the candidates under the published score
and its variants, and the part of them that was kept at 20 % attended.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvlens.engine.engine import Engine
from kvlens.engine.models import load
from kvlens.lab.claims.methods.chess_cases import LENGTH, toy_case
from kvlens.lab.claims.methods.chess_runs import Notes, forced, needed, parts, watching
from kvlens.methods import make_parameters
from kvlens.methods.chess.method import Chess
from kvlens.runs.machine import machine
from kvlens.statistics import normal

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


def measure(engine: Engine, prompts: int) -> list[dict[str, Any]]:
    """One row per variant: mean normalised rank (0 best, 0.5 chance) with its interval, share kept, without hierarchy,
    chance, n."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*VARIANTS, *PARTS)}
    for index in range(prompts):
        for task, size in TASKS:
            case = toy_case(engine, task, size, index)
            case = replace(case, answer=case.answer[:1])
            for name, overrides in VARIANTS.items():
                notes: Notes = []
                params = make_parameters(Chess, "demo", {"keep": KEEP, "trigger": "never", **overrides})
                _, first = forced(engine, case, watching(notes), params, notes)
                found[name] += needed(case, first, params.page)
                if not VARIANTS[name]:
                    for part, ranked in zip(PARTS, parts(case, first, params.page), strict=True):
                        found[part] += ranked
    rows = []
    for name, ranks in found.items():
        mean, low, high = normal([r["rank"] for r in ranks])
        row = {"variant": name, "rank": mean, "low": low, "high": high, "n": len(ranks)}
        rows.append(row | {key: float(np.mean([r[key] for r in ranks])) for key in ("kept", "flat", "chance")})
    return rows


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("kvlens/lab/results/chess_ranks.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(Engine(load("demo")), given.prompts)
    about = {
        "model": "demo",
        "length": LENGTH,
        "keep": KEEP,
        "tasks": [task for task, _ in TASKS],
        "prompts": given.prompts,
        "torch": torch.__version__,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    given.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for r in rows:
        shares = f"{r['kept']:.0%} | {r['flat']:.0%} | {r['chance']:.0%}"
        print(f"| {r['variant']} | {r['rank']:.2f} ({r['low']:.2f}-{r['high']:.2f}) | {shares} | {r['n']} |")


if __name__ == "__main__":
    main()
