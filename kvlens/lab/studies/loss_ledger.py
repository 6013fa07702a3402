"""What lost answers of every family owe to which cause, and whether the repair of the largest cause brings them back.

    python -m kvlens.lab.studies.loss_ledger [--methods A,B] [--prompts N] [--length TOKENS] [--budget SHARE]
        [--model MODEL] [--device DEVICE] [--kept FILE] [--out FILE] [--page FILE] [--summarise]

Prompts go round over niah_multikey, niah_kinds and niah_single, and over a question that is known and one that is fed
after the context was placed. A method that cannot keep to the budget gets 1.02 times its smallest one, which the row
records. Every prompt that full KV answers also gets its oracle frontier. Trials are kept one a line, so that an
interrupted study goes on; rows of a preset that is no longer the usual one count no more. `--summarise` makes the table
of what is kept and runs nothing.

It is no study of kvlens.studies: a repair changes what happens inside a run, and follows from that run's effects.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlens import methods, tasks
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.engine.comparison import Reference
from kvlens.engine.engine import Engine, Options, Result
from kvlens.holds import Hold
from kvlens.lab.bench import kept as keeping
from kvlens.lab.bench.lostcase import References
from kvlens.lab.bench.provenance import about, made_elsewhere
from kvlens.lab.bench.trialprompts import DEPTHS, Prompts, Trial
from kvlens.lab.bench.trials import chosen, header
from kvlens.lab.studies.ledger_page import write_page
from kvlens.lab.studies.ledger_table import FRONTIER, summarise, tracks_of
from kvlens.lab.studies.rocpicture import picture
from kvlens.ledger.foresight import roc
from kvlens.ledger.frontier import find_frontier
from kvlens.ledger.measure import Measure, NothingLost
from kvlens.ledger.signals import signals_of
from kvlens.lens.trials import Trials
from kvlens.methods.naming import installed
from kvlens.methods.parameters import FIT
from kvlens.models.device import CPU, settle
from kvlens.models.find import default_model
from kvlens.runs.answerend import answer_end
from kvlens.runs.request import default_preset

FIRST_SEED = 8_400_000
METHODS = (
    "streaming_llm,h2o,tova,snapkv,keydiff,expected_attention,semanticache,quest,freekv,arkvale,infllm,chess,sekv,"
    "infinigen,shadowkv,kivi"
)
TASKS = ("niah_multikey", "niah_kinds", "niah_single")
QUESTIONS = ("in", "after")
LIFT = 1.02
"""times its smallest feasible budget: what a method gets that cannot keep to the one asked for"""
BEHIND = 2
"""steps that a free run goes on behind the answer's end"""
WATCHED = 4
"""every so manieth answer that was kept is followed too, for its signals"""
_NEEDED = ("method", "task", "question", "index", "lost")


def trial_of(index: int, method: str, length: int, budget: str) -> Trial:
    """Return the trial of a prompt: tasks go round first, then where the question stands, then the depth."""
    task, question = TASKS[index % len(TASKS)], QUESTIONS[index // len(TASKS) % len(QUESTIONS)]
    depth = DEPTHS[index // (len(TASKS) * len(QUESTIONS)) % len(DEPTHS)]
    return Trial(task, length, depth, FIRST_SEED + index, index, method, budget, question)


def is_usual(row: dict[str, Any], model: str) -> bool:
    """Return True for the row of a frontier, or of a method under the preset that is the model's usual one today, or
    under `fit`. Rows of a preset that was usual before, or of a method that is not installed, stay in the file and do
    not count."""
    name = row["method"]
    if name == FRONTIER:
        return True
    return installed(name) is not None and row["preset"] in (FIT, default_preset(name, model))


class Ledgers:
    """Trials of one model."""

    def __init__(self, engine: Engine, prompts: Prompts) -> None:
        self.engine, self.prompts = engine, prompts
        self.references = References(engine, prompts)

    def measure(self, trial: Trial) -> dict[str, Any]:
        """One prompt under one method -> lost, the ledger of a lost answer, signals by step, resident bytes."""
        cpu_before = time.process_time()
        row = header(trial, self.engine.loaded.name) | {"lost": False, "right": None}
        prompt = self.prompts.prompt(trial)
        options = Options(max_new=tasks.get(trial.task).new_tokens)
        reference = self.references.find(trial, options)
        if reference is None:
            return row | {"full": "wrong"}
        end = answer_end(self.engine.loaded, prompt, reference, len(prompt.asked), True)
        short = max(1, end + BEHIND - len(prompt.asked))
        usual, options = options, replace(options, max_new=min(short, options.max_new), planned=options.max_new)
        try:
            trials, free = self._run_first(trial, row, reference, usual, options)
        except ValueError as error:
            return row | {"refused": str(error)}
        task_prompt = self.prompts.asked(trial)

        def answers(holds: tuple[Hold, ...]) -> bool:
            return tasks.is_right(trial.task, task_prompt.answer, trials.free(holds).text)

        right = tasks.is_right(trial.task, task_prompt.answer, free.text)
        full_bytes = self.engine.loaded.shape.full_kv_bytes(len(prompt.ids) + len(prompt.asked) + usual.max_new)
        row |= {"right": right, "peak_bytes": free.peak_bytes, "full_bytes": full_bytes}
        if right and trial.index % WATCHED:
            return row
        try:
            measure = Measure(trials, end)
        except NothingLost:
            return row | {"agreed": True}
        row |= {"signals": _signals(measure, len(prompt.asked))}
        if right:
            return row
        ledger = measure.account(answers)
        return row | {"lost": True, "ledger": ledger.to_json(), "cpu_s": time.process_time() - cpu_before}

    def _run_first(
        self, trial: Trial, row: dict[str, Any], reference: Reference, usual: Options, options: Options
    ) -> tuple[Trials, Result]:
        """Return repeats of the trial and its free run, at the smallest feasible budget where the one asked for is too
        small. usual: the run's options before it was cut short behind the answer."""
        prompt, method = self.prompts.prompt(trial), methods.get(trial.method)
        limit = Budget.parse(trial.budget) if row["rule"] == "resident bytes" else None
        read = self.prompts.read(trial, method)

        def run_at(limit: Budget | None) -> tuple[Trials, Result]:
            params = chosen(self.engine, prompt, method, row, limit, usual).params
            trials = Trials(self.engine, prompt, method, params, limit, options, reference, reader=lambda: read)
            return trials, trials.free(())

        try:
            return run_at(limit)
        except BudgetInfeasible as error:
            lifted = Budget.parse(f"{min(1.0, LIFT * error.smallest / error.full):.4f}")
            row["held_to"] = round(lifted.amount, 4)
            return run_at(lifted)

    def frontier(self, trial: Trial) -> dict[str, Any]:
        """One prompt -> its oracle frontier."""
        row = header(replace(trial, method="full"), self.engine.loaded.name)
        row |= {"method": FRONTIER, "lost": False}
        prompt = self.prompts.prompt(trial)
        options = Options(max_new=tasks.get(trial.task).new_tokens)
        reference = self.references.find(trial, options)
        if reference is None:
            return row | {"full": "wrong"}
        full, read = methods.get("full"), self.prompts.read(trial)
        params = methods.make_parameters(full, None, {})
        end = answer_end(self.engine.loaded, prompt, reference, len(prompt.asked), True)
        result = find_frontier(
            lambda drops: Trials(
                self.engine, prompt, full, params, None, options, reference, reader=lambda: read, drops=drops
            ),
            end,
        )
        return row | {"frontier_bytes": result.resident_bytes, "full_bytes": result.full_bytes, "pages": result.pages}


def _signals(measure: Measure, question_steps: int) -> list[dict[str, Any]]:
    """Return the signals of every step of the answer beside whether its token was lost."""
    rows = []
    for step, record in enumerate(measure.story.steps):
        if step >= question_steps and record.loss is not None:
            rows.append({"lost": not record.loss.agrees} | signals_of(record, measure.logits[step]))
    return rows


def carry_out(
    names: tuple[str, ...], model: str, device: str, prompts: int, length: int, budget: str, kept_file: Path
) -> None:
    """Run what is not in `kept_file` yet, prompt by prompt."""
    import torch

    from kvlens.engine.models import load

    torch.set_num_threads(1)
    rows = keeping.read(
        kept_file, _NEEDED, lambda row: row["length"] == length and row["budget"] == budget and is_usual(row, model)
    )
    finished = {(row["method"], row["index"]) for row in rows}
    unanswered = {row["index"] for row in rows if row.get("full") == "wrong"}
    engine = Engine(load(model, settle(device)))
    ledgers = Ledgers(engine, Prompts(engine, FIRST_SEED, names))
    for index in sorted(set(range(prompts)) - unanswered):
        for name in (*names, FRONTIER):
            if (name, index) in finished:
                continue
            trial = trial_of(index, name, length, budget)
            row = ledgers.frontier(trial) if name == FRONTIER else ledgers.measure(trial)
            keeping.append(kept_file, row)
            if row.get("full") == "wrong":
                break
            print(index, name, row.get("frontier_bytes", row.get("right")), row.get("refused", ""), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--device", default=CPU, help="auto (CUDA where there is one), cpu or cuda")
    parser.add_argument("--kept", type=Path, default=Path("loss_ledger.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("kvlens/lab/results/loss_ledger.json"))
    parser.add_argument("--summarise", action="store_true", help="make the table of what is kept; run nothing")
    parser.add_argument("--page", type=Path, default=None, help="renew the tables of this page, and roc.svg beside it")
    options = parser.parse_args()
    names = tuple(options.methods.split(","))
    if not options.summarise:
        carry_out(names, options.model, options.device, options.prompts, options.length, options.budget, options.kept)
    rows = keeping.read(
        options.kept, _NEEDED, lambda row: row["length"] == options.length and is_usual(row, options.model)
    )
    names = tuple(name for name in names if any(row["method"] == name for row in rows))
    setting = {"model": options.model, "length": options.length, "budget": options.budget, "tasks": TASKS}
    document = {"about": about(names, options.model) | setting | made_elsewhere(rows)} | summarise(rows)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    if options.page is not None:
        write_page(options.page, document)
        curves = picture(roc(tracks_of(rows)), document["signals"])
        options.page.with_name("roc.svg").write_text(curves, encoding="utf-8")


if __name__ == "__main__":
    main()
