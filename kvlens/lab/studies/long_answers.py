"""Whether a method that evicts while it decodes still has, behind a long answer, what it read before the answer.

    python -m kvlens.lab.studies.long_answers [--task NAME] [--budget SHARE] [--prompts N] [--batch N]
        [--minutes M] [--out FILE]

The answer writes a list, then names a number of the prompt: 590 tokens of the task `months`, 390 of `countdown`.
SmolLM2 reads plain text: in its chat form it ends the answer behind the list. The steps of a batch of prompts are
computed together, and nothing is recorded. An answer ends with its first line. The file is written after each trial,
and a trial in it is not run again. `kvlens.lab.studies.long_generation` measures what such an answer takes.

It is no study of kvlens.studies: it counts the entries of the whole answer, and a trial keeps its beginning.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.engine.batch import Seat
from kvlens.engine.engine import Cancelled, Engine
from kvlens.engine.models import LoadedModel, load
from kvlens.engine.options import Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.bench.provenance import about, origin
from kvlens.lab.bench.trials import chosen, settings
from kvlens.runs.request import Report
from kvlens.statistics import wilson
from kvlens.studies.batching import carry_out_together
from kvlens.tasks import TaskPrompt, ask, prompt_of
from kvlens.tasks.countdown import COUNTDOWN
from kvlens.tasks.encoding import encoding_of
from kvlens.tasks.listed import Listed
from kvlens.tasks.months import MONTHS
from kvlens.text.prompts import Prompt, tokenize

METHODS = (methods.REFERENCE, "streaming_llm", "random_decode", "h2o", "rkv", "raas", "tova", "keyformer")
MODEL, CHAT = "smollm2", "off"
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""places of the fact, which go round"""
OUT = Path("kvlens/lab/results")
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A task, prompt tokens at most (the fewest that hold any prompt), tokens of the list and of a sentence, and the
    budget."""

    task: Listed
    length: int
    new_tokens: int
    budget: str = "20%"


PLANS = {plan.task.name: plan for plan in (Plan(MONTHS, 1000, 620), Plan(COUNTDOWN, 236, 400))}
Item = tuple[int, str]
"""number of a prompt, name of a method"""


class Runner:
    """Runs the trials of a prompt, one method after the other, at a place among prompts that share steps."""

    def __init__(self, loaded: LoadedModel, plan: Plan, seat: Seat | None, cancelled: Callable[[], bool]) -> None:
        self._engine, self._plan, self._cancelled = Engine(loaded, seat), plan, cancelled
        self._read: tuple[int, TaskPrompt, Prompt, ReadPrompt] | None = None

    def run(self, item: Item) -> Row | None:
        """Return the row of a trial; None if it was cancelled."""
        number, name = item
        prompt, tokens, read = self._reading(number)
        method, options = methods.get(name), Options(max_new=self._plan.new_tokens, stop=("\n",))
        limit = None if method.keeps_all else Budget.parse(self._plan.budget)
        preset, overrides, _ = settings(method, MODEL, "")
        row: Row = {"prompt": number, "method": name, "date": time.strftime("%Y-%m-%d", time.gmtime())}
        try:
            choice = chosen(self._engine, tokens, method, {"preset": preset, "overrides": overrides}, limit, options)
            asked_run = (tokens, method, choice.params, limit, options)
            result = self._engine.run(*asked_run, cancelled=self._cancelled, read=read)
        except BudgetInfeasible as error:
            return row | {"refused": str(error)}
        except Cancelled:
            return None
        task = self._plan.task
        right, counted = task.score(prompt.answer, result.text) == 1.0, task.counted(result.text)
        row |= {"preset": choice.preset, "right": right, "counted": counted, "answer": prompt.answers[0]}
        row["named"] = prompt.answers[0] in result.text
        row |= {"prompt_tokens": len(tokens.ids), "peak_bytes": result.peak_bytes, "end": result.text[-80:]}
        return row | {"ids": list(result.ids)}

    def end_prompt(self) -> None:
        """Let the reading of the prompt go."""
        self._read = None

    def _reading(self, number: int) -> tuple[TaskPrompt, Prompt, ReadPrompt]:
        if self._read is None or self._read[0] != number:
            tokenizer, kinds = self._engine.loaded.tokenizer, list(map(methods.get, METHODS))
            depth, encoded = DEPTHS[number % len(DEPTHS)], encoding_of(tokenizer, CHAT)
            prompt = ask(self._plan.task, self._plan.length, depth, number, encoded)
            tokens = tokenize(prompt_of(prompt), tokenizer, None, self._plan.new_tokens, CHAT)
            queries = max(128, *(kind.needs.queries for kind in kinds))
            received = any(kind.needs.received for kind in kinds)
            self._read = number, prompt, tokens, self._engine.read(tokens, queries=queries, received=received)
        return self._read[1:]


def measure(plan: Plan, prompts: int, batch: int, minutes: float, out: Path) -> dict[str, Any]:
    """Run the trials that `out` lacks, and write it after each of them. Trials of other code are run again."""
    torch.set_num_threads(1)
    trial_form = plan.task.name, plan.length, plan.budget, plan.new_tokens
    origins = {name: origin(MODEL, name, *trial_form) for name in METHODS}
    stored = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": []}
    rows = {(row["prompt"], row["method"]): row for row in stored["rows"] if row["origin"] == origins[row["method"]]}
    items = [[(number, name) for name in METHODS if (number, name) not in rows] for number in range(prompts)]
    loaded, until = load(MODEL), time.monotonic() + 60 * minutes

    def finish(row: Row) -> None:
        rows[row["prompt"], row["method"]] = row | {"origin": origins[row["method"]]}
        print(row["prompt"], row["method"], row.get("right"), row.get("counted"), file=sys.stderr, flush=True)
        write(plan, out, list(rows.values()))

    def runner_at(seat: Seat | None, report: Report, cancelled: Callable[[], bool]) -> Runner:
        return Runner(loaded, plan, seat, cancelled)

    def stop() -> bool:
        return time.monotonic() > until

    waiting = [part for part in items if part]
    carry_out_together(batch, waiting, runner_at, Runner.run, finish, lambda *phase: None, stop)
    return write(plan, out, list(rows.values()))


def write(plan: Plan, out: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Store rows, and lines of them, with their provenance; return what is stored."""
    settings_row: Row = {"task": plan.task.name, "chat": CHAT, "budget": plan.budget, "length": plan.length}
    settings_row["new_tokens"] = plan.new_tokens
    ordered = sorted(rows, key=lambda row: (row["prompt"], METHODS.index(row["method"])))
    provenance = about(METHODS, MODEL) | {"model": MODEL, "dtype": "float32", "question": "in"} | settings_row
    stored = {"about": provenance, "lines": lines_of(plan, ordered), "rows": ordered}
    out.write_text(json.dumps(stored) + "\n", encoding="utf-8")
    return stored


def lines_of(plan: Plan, rows: Sequence[Row]) -> list[Row]:
    """Return a line per method: n, right (with Wilson's interval), answers with the whole list, answers with the number
    anywhere, the mean of entries written right, and the median of tokens equal to full KV's. A refused trial is not in
    n."""
    full = {row["prompt"]: row for row in rows if row["method"] == methods.REFERENCE}
    lines = []
    for method in METHODS:
        part = [row for row in rows if row["method"] == method and "refused" not in row]
        if not part:
            continue
        right, n = sum(row["right"] for row in part), len(part)
        low, high = wilson(right / n, n)
        line = {"method": method, "n": n, "right": right, "low": low, "high": high}
        line["named"] = sum(row["named"] for row in part)
        line["whole"] = sum(row["counted"] >= plan.task.asked for row in part)
        line["counted"] = mean(row["counted"] for row in part)
        line["equal_tokens"] = median(equal_tokens(row["ids"], full[row["prompt"]]["ids"]) for row in part)
        lines.append(line | {"presets": sorted({str(row["preset"]) for row in part} - {"None"})})
    return lines


def equal_tokens(ids: Sequence[int], reference: Sequence[int]) -> int:
    """Return how many tokens two answers have in common until the first that differs."""
    pairs = enumerate(zip(ids, reference, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ids), len(reference)))


def table(plan: Plan, lines: Sequence[Row]) -> str:
    """Return the lines as Markdown."""
    entries = f"right entries, mean of {plan.task.asked}"
    head = f"| method | preset | right | 95 % | whole lists | number anywhere | {entries} | equal tokens, median |"
    body = []
    for line in lines:
        title, presets = methods.get(line["method"]).title, ", ".join(line["presets"]) or "-"
        interval = f"{100 * line['low']:.0f} to {100 * line['high']:.0f} %"
        counts = f"{line['right']} of {line['n']} | {interval} | {line['whole']} | {line['named']}"
        body.append(f"| {title} | {presets} | {counts} | {line['counted']:.0f} | {line['equal_tokens']:.0f} |")
    return "\n".join([head, "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |", *body])


def main() -> None:
    """Measure what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(PLANS), default=MONTHS.name)
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=60.0, help="no step is begun after this long")
    parser.add_argument("--out", type=Path, help="default: long_answers-TASK-SHARE.json in kvlens/lab/results")
    options = parser.parse_args()
    plan = replace(PLANS[options.task], budget=options.budget)
    out = options.out or OUT / f"long_answers-{options.task}-{options.budget.rstrip('%')}.json"
    print(table(plan, measure(plan, options.prompts, options.batch, options.minutes, out)["lines"]))


if __name__ == "__main__":
    main()
