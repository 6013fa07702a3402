"""SeKV on a real model through the engine: whether answers survive a budget, prompt by prompt, for arms that differ in
parameters.

    python -m kvlens.lab.studies.sekv_runs [--prompts 50] [--first 0] [--arms full,no-coarse@20%] [--router FILE]
    [--runs FILE]
        [--out FILE]

With --router, a file of `kvlens train sekv`, there are the arms of a trained router, too. Prompts are those of
kvlens/lab/studies/sekv_real.py: real prose, one sentence that tells a number, the question known. Rows go to --runs
as they are made, and what is there is not made again; --out gets the table of all of them.

It is no study of kvlens.studies: its prompts and its judge are those of sekv_real, and it takes CPU time.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import torch

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.engine import models
from kvlens.engine.engine import Engine, Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.bench.provenance import weights
from kvlens.lab.studies.sekv_real import NEW, PUBLISHED, ask, line
from kvlens.models.device import machine
from kvlens.text.prompts import Prompt

LENGTH = 2048
ARMS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "full": (None, {}),
    "no-coarse": ("no-coarse", {}),
    "no-coarse with coarse entries": ("no-coarse", {"coarse": True}),
    "no-coarse with router pca": ("no-coarse", {"router": "pca", "dim": 16, "index": "exact"}),
    "no-coarse with spans to 64": ("no-coarse", {"l_max": 64}),
    "no-coarse with whole heads": ("no-coarse", {"whole_share": 0.5}),
    "no-coarse with whole heads and coarse entries": ("no-coarse", {"whole_share": 0.5, "coarse": True}),
    "whole heads alone": ("no-coarse", {"whole_share": 0.8, "zoom": "off"}),
    "bound": ("bound", {}),
    "published": ("paper", PUBLISHED),
    "published for all that fits as it is": ("paper", {**PUBLISHED, "zoom_rate": 1.0, "form": "raw"}),
    "mean key for all that fits as it is": ("paper", {**PUBLISHED, "router": "mean", "zoom_rate": 1.0, "form": "raw"}),
}
"""name -> preset (None: full KV) and what replaces its parameters"""
ALL = {"tau": 1e-6}
"""every span is asked for and the budget decides"""
USUAL = "full,no-coarse@20%,no-coarse@10%"


def trained(router: Path) -> dict[str, tuple[str | None, dict[str, Any]]]:
    """Arms of a trained router: as published; as many spans as the budget holds, by its scores; those as they are, so
    that what is lost is lost by routing."""
    published = {**PUBLISHED, "router": "trained", "router_file": str(router)}
    return {
        "trained": ("paper", published),
        "trained for all that fits": ("paper", published | ALL),
        "trained for all that fits as it is": ("paper", published | ALL | {"form": "raw"}),
    }


def right(number: str, text: str) -> bool:
    """Whether an output begins with the number and nothing that continues it."""
    return re.match(rf"\s*{number}(?!\d)", text) is not None


def run(engine: Engine, prompt: Prompt, number: str, read: ReadPrompt, arm: str) -> dict[str, Any]:
    """One answer; what is written down of it. arm: a name of ARMS, and @BUDGET."""
    name, _, share = arm.partition("@")
    preset, switches = ARMS[name]
    method = methods.get("sekv" if preset else "full")
    params = methods.make_parameters(method, preset, switches)
    start_time = time.process_time()
    try:
        budget = Budget.parse(share) if share else None
        result = engine.run(prompt, method, params, budget, Options(max_new=NEW), read=read)
    except BudgetInfeasible as error:
        return {"infeasible": round(error.smallest / error.full, 4)}
    full = engine.loaded.shape.full_kv_bytes(len(prompt.ids) + NEW)
    return {
        "exact": float(right(number, result.text)),
        "text": result.text,
        "peak_share": result.peak_bytes / full,
        "seconds": round(time.process_time() - start_time, 2),
    }


def named(set_: dict[str, Any]) -> dict[str, Any]:
    """Parameters without the folder of a file."""
    return {name: Path(value).name if name == "router_file" else value for name, value in set_.items()}


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per arm: n, exact match with its Wilson interval, mean share of full KV at the peak."""
    arms: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        if "exact" in row:
            arms.setdefault(row["arm"], []).append({key: row[key] for key in ("exact", "peak_share")})
    return [line(arm, total) for arm, total in arms.items()]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="index of the first prompt")
    parser.add_argument("--arms", default=USUAL, help="names, each with @BUDGET, apart by commas")
    parser.add_argument("--router", type=Path, help="a trained router, for the arms that need one")
    parser.add_argument("--runs", type=Path, default=Path("runs/sekv_runs.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("build/sekv_runs.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.router:
        ARMS.update(trained(arguments.router))
    arguments.runs.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(text) for text in arguments.runs.read_text().splitlines()] if arguments.runs.exists() else []
    finished = {(row["index"], row["arm"]) for row in rows}
    engine = Engine(models.load(arguments.model, "cpu"))
    target = arguments.arms.split(",")
    for index in range(arguments.first, arguments.first + arguments.prompts):
        missing = [arm for arm in target if (index, arm) not in finished]
        if not missing:
            continue
        prompt, number = ask(engine.loaded.tokenizer, LENGTH, index)
        read = engine.read(prompt)
        for arm in missing:
            row = {"index": index, "arm": arm, "answer": number} | run(engine, prompt, number, read, arm)
            rows.append(row)
            with arguments.runs.open("a") as file:
                file.write(json.dumps(row) + "\n")
    about = {**machine(), "model": arguments.model, "weights": weights(arguments.model), "threads": 1}
    settings = {name: {"preset": preset, "set": named(set_)} for name, (preset, set_) in ARMS.items()}
    if arguments.router:
        settings["trained"]["router"] = json.loads(arguments.router.with_suffix(".json").read_text())
    request = {"length": LENGTH, "question": "known", "arms": settings}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"about": about, **request, "lines": table(rows)}, indent=1) + "\n")
    for lines in table(rows):
        print(f"{lines['arm']:36s} {lines['exact']:.2f} ({lines['low']:.2f}-{lines['high']:.2f}) n={lines['n']}")


if __name__ == "__main__":
    main()
