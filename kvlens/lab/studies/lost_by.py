"""What methods lose needles by on a real model: arms that change one of their numbers, and one that holds what
had most effect on the choice.

    python -m kvlens.lab.studies.lost_by [--methods A,B] [--prompts N] [--length TOKENS] [--depth SHARE] [--task TASK]
        [--budget SHARE] [--model MODEL] [--out FILE]

InfLLM, ShadowKV, InfiniGen and RocketKV lose most single needles at 1,024 tokens; CompressKV and ArkVale begin to at
4,096; SnapKV and KIVI lose one among nine numbers at 40 %.

Prompts of niah_single unless a task is named, the needle in the middle unless a depth is, the question known.
*unchanged*: the method as the tables have it at that share of full KV (20 %), with the preset that is named beside; an
arm changes what its name says, the budget where that is named. ShadowKV's other arms attend a fixed number of tokens of
chosen chunks and have no byte limit, so that its rank and its chunks can be changed apart. *held*: of the answers that
*unchanged* loses, those that come back when the 20 (layer, KV head, span) with most effect are held.

It is no study of kvlens.studies: what an arm holds follows from the effects of the run before it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvlens import methods
from kvlens.budget import Budget
from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import load
from kvlens.holds import holds_of
from kvlens.lab.bench.lostcase import Case, References
from kvlens.lab.bench.provenance import about
from kvlens.lab.bench.trialprompts import Prompts, Trial
from kvlens.lab.bench.trials import chosen, header
from kvlens.models.find import default_model

FIRST_SEED, BUDGET, HELD = 8_000_100, "20%", 20
UNCHANGED = "unchanged"
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "infllm": {
        UNCHANGED: {},
        **{f"representatives={n}": {"representatives": n} for n in (2, 4, 8)},
        "page=16": {"page": 16},
        "positions=true": {"positions": "true"},
        "positions=true page=16": {"positions": "true", "page": 16},
    },
    "shadowkv": {
        UNCHANGED: {},
        **{
            f"rank={rank} chunk={chunk} tokens={tokens}": {"rank": rank, "chunk": chunk, "tokens": tokens}
            for chunk, tokens, ranks in ((16, 96, (0.0735, 0.15625, 0.5, 1.0)), (8, 96, (0.15625, 0.5, 1.0)))
            for rank in ranks
        },
    },
    "infinigen": {
        UNCHANGED: {},
        "alpha=5": {"alpha": 5.0},
        "alpha=8": {"alpha": 8.0},
        "sinks=1": {"sinks": 1},
        "sinks=4": {"sinks": 4},
        "budget=40%": {"budget": "40%"},
        "alpha=5 budget=40%": {"alpha": 5.0, "budget": "40%"},
        "alpha=8 budget=40%": {"alpha": 8.0, "budget": "40%"},
        "sinks=1 budget=40%": {"sinks": 1, "budget": "40%"},
        "partial=0.4 budget=40%": {"partial": 0.4, "budget": "40%"},
        "ahead=false budget=40%": {"ahead": False, "budget": "40%"},
    },
    "rocketkv": {UNCHANGED: {}, "kernel=7": {"kernel": 7}, "budget=40%": {"budget": "40%"}},
    "compresskv": {
        UNCHANGED: {},
        "layers=equal": {"layers": "equal"},
        "ceiling=1.5": {"ceiling": 1.5},
        "floor=400": {"floor": 400},
        "heads=all": {"heads": "all"},
        "heads=all layers=equal": {"heads": "all", "layers": "equal"},
        "heads=trh_topk": {"heads": "trh_topk"},
        "top_heads=2": {"top_heads": 2},
        "top_heads=9": {"top_heads": 9},
        "kernel=1": {"kernel": 1},
        "kernel=21": {"kernel": 21},
        "window=32": {"window": 32},
        "budget=40%": {"budget": "40%"},
    },
    "snapkv": {
        UNCHANGED: {},
        "kernel=1": {"kernel": 1},
        "kernel=21": {"kernel": 21},
        "window=16": {"window": 16},
        "window=64": {"window": 64},
        "window=64 kernel=21": {"window": 64, "kernel": 21},
    },
    "kivi": {UNCHANGED: {}, "bits=4 budget=100%": {"bits": 4, "budget": "100%"}, "budget=100%": {"budget": "100%"}},
    "arkvale": {
        UNCHANGED: {},
        "page=16": {"page": 16},
        "page=8": {"page": 8},
        "volume=range": {"volume": "range"},
        "group=kv_head": {"group": "kv_head"},
        "page=16 group=kv_head": {"page": 16, "group": "kv_head"},
        "top=1": {"top": 1.0},
        "dense_layers=0": {"dense_layers": 0},
        "budget=40%": {"budget": "40%"},
    },
}
"""the budget of an arm that names none is the one asked for; of one with a number of tokens there is none"""


def measure(
    names: tuple[str, ...], model: str, prompts: int, length: int, depth: float, task: str, budget: str
) -> dict[str, Any]:
    """Right answers by method and arm, of those prompts that full KV answers."""
    torch.set_num_threads(1)
    engine = Engine(load(model))
    asked_of = {name: ARMS[name] for name in names}
    result = Prompts(engine, FIRST_SEED, names)
    references = References(engine, result)
    mapping: dict[str, dict[str, int]] = {
        name: dict.fromkeys([*arms, "lost", "held", "n"], 0) for name, arms in asked_of.items()
    }
    presets: dict[str, Counter[str]] = {}
    for index in range(prompts):
        for name, arms in asked_of.items():
            trial = Trial(task, length, depth, FIRST_SEED + index, index, name, budget)
            request, prompt, method = result.asked(trial), result.prompt(trial), methods.get(name)
            row, limit = header(trial, model), Budget.parse(budget)
            usual = chosen(engine, prompt, method, row, limit, Options(max_new=64))
            options = Options(max_new=12, planned=64)
            case = Case(engine, prompt, result.read(trial, method), request, trial, usual, limit, options)
            reference = references.find(trial, options)
            if reference is None:
                continue
            mapping[name]["n"] += 1
            presets[name] = presets.get(name, Counter()) + Counter([usual.preset or "defaults"])
            for arm, changes in arms.items():
                known_names = {key: value for key, value in changes.items() if key != "budget"}
                case.params = replace(usual.params, **known_names)
                case.budget = None if "tokens" in changes else Budget.parse(changes.get("budget", budget))
                right = case.answers(())
                mapping[name][arm] += right
                if arm == UNCHANGED and not right:
                    spans, ranking = case.shown(reference)
                    mapping[name]["lost"] += 1
                    mapping[name]["held"] += case.answers(holds_of(ranking[:HELD], spans))
        print(index, json.dumps(mapping), flush=True)
    sentence = about(names, model) | {"presets": {name: dict(visited) for name, visited in presets.items()}}
    setting = {"model": model, "length": length, "depth": depth, "task": task, "budget": budget}
    return {"about": sentence | setting, "right": mapping}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="infllm,shadowkv,infinigen")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--depth", type=float, default=0.5, help="share of the text before the needle")
    parser.add_argument("--task", default="niah_single")
    parser.add_argument("--budget", default=BUDGET)
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--out", type=Path, default=Path("kvlens/lab/results/lost_by.json"))
    options = parser.parse_args()
    names = tuple(options.methods.split(","))
    if unknown := [name for name in names if name not in ARMS]:
        parser.error(f"there are no arms for {', '.join(unknown)}; there are some for {', '.join(ARMS)}.")
    options.out.write_text(
        json.dumps(
            measure(names, options.model, options.prompts, options.length, options.depth, options.task, options.budget),
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
