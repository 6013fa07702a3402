"""Whether a long answer stays flat: what a method keeps on the device, and what a step takes, over hundreds of steps.

    python -m kvlens.lab.studies.long_generation [--methods NAMES] [--minutes M] [--model MODEL] [--out FILE]

Every method reads PROMPT tokens of real prose and is fed the STEPS tokens that follow them there, under BUDGET of full
KV of both. Its own arithmetic says what a longer answer takes (`Method.floor_bytes`): a method that keeps the KV of
every token it generates is named as such and not run. Of the others, in one run: the most that was on the device (room
for the whole answer is taken before the first step, so that no more is taken later), what the process and the cold tier
grew by in the second half, and CPU seconds per step, the last quarter's over the second quarter's, so that a machine
that is slow all along cancels out: the medians, and those of the fastest tenth, which other processes disturb less.
FullKV without a limit stands beside them. Finished rows are kept in the file; a row made by other code or settings is
made again.

It is no study of kvlens.studies: it reads memory and CPU time of the process between steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.engine.engine import Engine, Options
from kvlens.engine.loop import Generation
from kvlens.engine.models import load
from kvlens.engine.prefill import ReadPrompt
from kvlens.engine.session import Session
from kvlens.lab.bench.passages import passage
from kvlens.lab.bench.provenance import about, origin
from kvlens.lab.bench.textrequest import FreeTextRequest
from kvlens.lab.bench.trials import chosen, settings
from kvlens.methods.base import Method
from kvlens.models.find import default_model
from kvlens.shape import KVShape
from kvlens.text.prompts import Prompt
from kvlens.text.units import si_bytes

PROMPT, STEPS, BUDGET = 1024, 512, "20%"
OUT = Path("kvlens/lab/results/long_generation.json")
WHOLE = 0.5
"""of a token's KV: a method that needs more than this for one more token of its answer keeps all that it generates"""


class Watch:
    """What was seen after each step: CPU seconds of the process, and bytes on the device, in the cold tier, and of the
    process."""

    def __init__(self, session: Session) -> None:
        self.memory = session.memory
        self.seconds: list[float] = []
        self.resident: list[int] = []
        self.cold: list[int] = []
        self.process: list[int] = []

    def progress(self, phase: str, done: int, total: int) -> None:
        """Called by the loop when a step has ended, and once before the first."""
        if phase == "decode":
            self.seconds.append(time.process_time())
            self.resident.append(self.memory.account.resident)
            self.cold.append(self.memory.host.cold.bytes)
            self.process.append(_process_bytes())

    def figures(self) -> dict[str, Any]:
        """The row's own part: the most bytes on the device after any step, bytes of the cold tier and of the process at
        half and at the end, milliseconds of CPU per step in each quarter: the median, and what the fastest tenth stays
        below."""
        took = [1e3 * (after - before) for before, after in zip(self.seconds, self.seconds[1:], strict=False)]
        half = len(took) // 2
        return {
            "resident_most": max(self.resident[1:]),
            "cold_half": self.cold[half],
            "cold_last": self.cold[-1],
            "process_half": self.process[half],
            "process_last": self.process[-1],
            "median_ms": [median(part) for part in quarters(took)],
            "fast_ms": [quantiles(part, n=10)[0] for part in quarters(took)],
        }


def quarters(steps: list[float]) -> list[list[float]]:
    """Equally long parts; up to three steps at the end are left out."""
    size = len(steps) // 4
    return [steps[quarter * size : (quarter + 1) * size] for quarter in range(4)]


def _process_bytes() -> int:
    """Memory of this process that is in use, 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def growth(method: type[Method], params: Any, shape: KVShape, prompt_tokens: int, new: int) -> float:
    """Device bytes that the method's arithmetic asks for one more token of the answer, in tokens of KV: 1 where each is
    kept, 0 where one gives way to it, between them where an index, packed tokens or some heads keep of it."""
    twice, once = (method.floor_bytes(params, shape, prompt_tokens, tokens) for tokens in (2 * new, new))
    return (twice - once) / new / shape.token_bytes


@torch.inference_mode()
def generate(engine: Engine, prompt: Prompt, read: ReadPrompt, fed: tuple[int, ...], name: str) -> dict[str, Any]:
    """The row of a method; `refused` (a sentence) where it is not run."""
    method, shape = methods.get(name), engine.loaded.shape
    limit = None if method.keeps_all else Budget.parse(BUDGET)
    options = Options(max_new=len(fed), forced=fed)
    preset, overrides, _ = settings(method, engine.loaded.name, "")
    choice = chosen(engine, prompt, method, {"preset": preset, "overrides": overrides}, limit, options)
    context = engine.context(prompt, limit, options)
    row: dict[str, Any] = {"preset": choice.preset, "budget_bytes": context.budget_bytes}
    row["grows"] = growth(method, choice.params, shape, len(prompt.ids) - 1, len(fed))
    if row["grows"] > WHOLE and name != methods.REFERENCE:
        return row | {"refused": "It keeps every token of the answer."}
    try:
        session = Session(method, choice.params, context)
        try:
            watch = Watch(session)
            Generation(engine.loaded, prompt, session, options, None, watch.progress).go(read)
        finally:
            session.close()
    except BudgetInfeasible as error:
        return row | {"refused": str(error)}
    return row | watch.figures()


def measure(model: str, names: list[str], minutes: float, out: Path) -> dict[str, Any]:
    """Rows of the methods that are not in `out` yet, written there one by one."""
    torch.set_num_threads(1)
    origins = {name: origin(model, name, PROMPT, STEPS, BUDGET) for name in names}
    stored = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": []}
    rows = {row["method"]: row for row in stored["rows"] if origins.get(row["method"], row["origin"]) == row["origin"]}
    engine, start_time = Engine(load(model)), time.monotonic()
    first_seed = FreeTextRequest(model=model).first_seed
    prompt, fed = passage(first_seed, PROMPT, STEPS, engine.loaded.tokenizer, engine.loaded.max_positions)
    queries = max(128, *(methods.get(name).needs.queries for name in names))
    read = engine.read(prompt, queries=queries, received=any(methods.get(name).needs.received for name in names))
    for name in names:
        if name in rows or time.monotonic() - start_time > 60 * minutes:
            continue
        row = {"method": name, "date": time.strftime("%Y-%m-%d", time.gmtime()), "origin": origins[name]}
        rows[name] = row | generate(engine, prompt, read, fed, name)
        print(line(rows[name]), file=sys.stderr, flush=True)
        provenance = about(tuple(rows), model) | {
            "model": model,
            "prompt_tokens": PROMPT,
            "steps": STEPS,
            "budget": BUDGET,
        }
        stored = {"about": provenance, "rows": list(rows.values())}
        out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return stored


def line(row: dict[str, Any]) -> str:
    """A row for people, as Markdown."""
    title, grows = methods.get(row["method"]).title, f"{row['grows']:.2f}"
    if "refused" in row:
        return f"| {title} | {grows} | not run | | | | |"
    _, second, _, last = row["median_ms"]
    _, fast, _, faster = row["fast_ms"]
    budget = f"{row['resident_most'] / row['budget_bytes']:.2f}" if row["budget_bytes"] else "no limit"
    process, cold = (si_bytes(row[f"{name}_last"] - row[f"{name}_half"]) for name in ("process", "cold"))
    return (
        f"| {title} | {grows} | {budget} | {last / second:.2f} ({second:.0f} to {last:.0f} ms) | {faster / fast:.2f} "
        f"| {process} | {cold} |"
    )


def table(stored: dict[str, Any]) -> str:
    """All rows, those that keep the least of a longer answer first, a method before another by its name."""
    head = (
        "| method | bytes for one more token (tokens of KV) | most on the device / budget "
        "| CPU of a step, last quarter / second | of its fastest tenth | process grew, second half | cold tier grew |"
    )
    rows = sorted(stored["rows"], key=lambda row: (row["grows"] > WHOLE, "refused" in row, row["method"]))
    return "\n".join([head, "|---" * 7 + "|", *map(line, rows)])


def main() -> None:
    """Measure what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(methods.registry()))
    parser.add_argument("--minutes", type=float, default=60.0, help="no method is begun after this long")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    print(table(measure(options.model, options.methods.split(","), options.minutes, options.out)))


if __name__ == "__main__":
    main()
