"""What share of full KV each method holds where KV is stored in 16 bits, at the budgets of the quality tables.

    python -m kvlens.lab.studies.kv_formats [--model MODEL] [--lengths 1024,2048] [--budgets 5%,20%] [--out FILE]

The quality tables store KV in float32. Papers count 16-bit KV. A method that keeps keys and values as they are holds
nearly the same share of both; codes of few bits, indices and tables do not shrink with the format, so their share of
16-bit KV is larger, and a budget may refuse them. One prompt of a length, a few steps: the peak follows from sizes, not
from answers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from kvlens import methods, tasks
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import load
from kvlens.lab.bench.provenance import about
from kvlens.lab.bench.trialprompts import Prompts, Trial
from kvlens.lab.bench.trials import chosen, header

TASK, SEED, STEPS, DTYPE = "niah_single", 8_500_000, 2, "bfloat16"


def measure(model: str, lengths: list[int], budgets: list[str], names: list[str]) -> dict[str, Any]:
    """Return {"about", "lines"}: of each length, method and budget the peak as a share of full KV in 16 bits, or the
    least share that is feasible."""
    torch.set_num_threads(1)
    engine, lines = Engine(load(model, dtype=DTYPE)), []
    prompts = Prompts(engine, SEED, names)
    for length in lengths:
        for name in names:
            for budget in budgets if name != methods.REFERENCE else [""]:
                trial = Trial(TASK, length, 0.5, SEED, 0, name, budget, dtype=DTYPE)
                line = {"length": length, "method": name, "budget": budget} | share(engine, prompts, trial, model)
                lines.append(line)
                print(json.dumps(line), flush=True)
    request = {"model": model, "task": TASK, "dtype": DTYPE, "lengths": lengths, "budgets": budgets, "steps": STEPS}
    return {"about": about(tuple(names), model) | request, "lines": lines}


def share(engine: Engine, prompts: Prompts, trial: Trial, model: str) -> dict[str, Any]:
    """Return the preset and the peak of one arm, or what it needs, or why it cannot be run."""
    prompt, method, row = prompts.prompt(trial), methods.get(trial.method), header(trial, model)
    planned = prompts.asked(trial)

    new = tasks.get(planned.task).generation(trial.index).new_tokens
    limit = Budget.parse(trial.budget) if row["rule"] == "resident bytes" else None
    options = Options(STEPS, planned=new, forced=None)
    full = engine.loaded.shape.full_kv_bytes(len(prompt.ids) + new)
    try:
        choice = chosen(engine, prompt, method, row, limit, options)
        result = engine.run(prompt, method, choice.params, limit, options, read=prompts.read(trial, method))
    except BudgetInfeasible as error:
        return {"needs": error.smallest / error.full}
    except ValueError as error:
        return {"refused": str(error)}
    return {"preset": choice.preset, "resident_share": result.peak_bytes / full}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="1024,2048,4096")
    parser.add_argument("--budgets", default="5%,10%,20%,40%")
    parser.add_argument("--methods", default=",".join(methods.registry()))
    parser.add_argument("--out", type=Path, default=Path("build/formats.json"))
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    result = measure(arguments.model, lengths, arguments.budgets.split(","), arguments.methods.split(","))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
