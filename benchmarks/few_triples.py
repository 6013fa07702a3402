"""How few (layer, KV head, span) bring an answer back where the five that the lens names first do not: whether another
five would.

    python -m benchmarks.few_triples [--lost N] [--methods A,B] [--task TASK] [--budget SHARE] [--length TOKENS]
        [--model MODEL] [--out FILE]

Of each method so many lost answers of `kvlens bench explain`'s prompts (same seeds and parameters) that holding the
first five by effect on the choice does not bring back. *least*: a beginning of the ranking that does, and halves of
it do not. *found*: of that, what is left when parts are left out as long as the answer stays (kvlens/lens/fewest.py,
at most 60 sets tried); where the search *ended*, no single one of it can be left out. That no other set is smaller is
not proved.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from kvlens import methods
from kvlens.bench.explain import Case, ExplainRequest
from kvlens.bench.provenance import about
from kvlens.bench.trials import DEPTHS, Prompts, Trial, chosen, header
from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import load
from kvlens.lens.attribution import Triple
from kvlens.lens.fewest import Attempt, FewestBytes
from kvlens.lens.trials import holds_of
from kvlens.memory.budget import Budget
from kvlens.models.find import default_model

FIVE, MOST, RANKED = 5, 60, 64
"""triples that the lens is asked for; sets tried at most; candidates, in the order of their effect"""


def measure(names: tuple[str, ...], model: str, lost: int, task: str, budget: str, length: int) -> dict[str, Any]:
    """Per method: answers looked at that were lost, those that five bring back, and of each other one how many it
    takes."""
    torch.set_num_threads(1)
    engine, first = Engine(load(model)), ExplainRequest.first_seed
    prompts = Prompts(engine, first, names)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        mine = found[name] = {"lost": 0, "by_five": 0, "least": [], "found": [], "ended": [], "tried": [], "none": 0}
        index = 0
        while len(mine["found"]) + mine["none"] < lost and index < 4 * lost + 50:
            at = DEPTHS[index % len(DEPTHS)], first + index
            one(engine, prompts, Trial(task, length, *at, index, name, budget), mine)
            index += 1
            print(name, index, json.dumps(mine), flush=True)
    said = {"model": model, "task": task, "budget": budget, "length": length, "first_seed": first, "most": MOST}
    return {"about": about(names, model) | said, "methods": found}


def one(engine: Engine, prompts: Prompts, trial: Trial, found: dict[str, Any]) -> None:
    """One prompt, counted in `found`."""
    asked, prompt, method = prompts.asked(trial), prompts.prompt(trial), methods.get(trial.method)
    row = header(trial, engine.loaded.name)
    options = Options(max_new=64)
    limit = Budget.parse(trial.budget) if row["rule"] == "resident bytes" else None
    params = chosen(engine, prompt, method, row, limit, options).params
    case = Case(engine, prompt, prompts.read(trial, method), asked, trial, params, limit, options)
    if case.answers(()) or (reference := case.reference()) is None:
        return
    spans, rankings = case.rankings(reference)
    ranking = rankings["effect"][:RANKED]
    if not ranking:
        return
    found["lost"] += 1
    case.options = Options(max_new=16, planned=64)  # an answer that is back comes at once

    def tried(triples: tuple[Triple, ...]) -> Attempt:
        return Attempt(triples, len(triples), 0.0, case.answers(holds_of(triples, spans)))

    if tried(tuple(ranking[:FIVE])).restored:
        found["by_five"] += 1
        return
    came = FewestBytes(tried, lambda triple: 1, MOST).run(ranking)
    if came.best is None:
        found["none"] += 1
        return
    prefixes = [
        len(test.triples)
        for test in came.tests
        if test.restored and test.triples == tuple(ranking[: len(test.triples)])
    ]
    found["least"].append(min(prefixes))
    found["found"].append(len(came.best.triples))
    found["ended"].append(came.ended)
    found["tried"].append(len(came.tests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="streaming_llm,chess")
    parser.add_argument("--lost", type=int, default=12, help="answers that five do not bring back, per method")
    parser.add_argument("--task", default="niah_noise")
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/few_triples.json"))
    asked = parser.parse_args()
    names = tuple(asked.methods.split(","))
    result = measure(names, asked.model, asked.lost, asked.task, asked.budget, asked.length)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
