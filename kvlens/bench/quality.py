"""The quality table: every method on the same generated prompts at the same budgets. Resumable; one line per trial is kept."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvlens import __version__, methods
from kvlens.bench.intervals import wilson
from kvlens.bench.trials import DEPTHS, NEW_TOKENS, Prompts, Trial, carry_out, settings
from kvlens.budget import Budget
from kvlens.machine import machine

REFERENCE = "full"
"""run once per prompt, without a limit"""


class QualityRequest(BaseModel):
    """What to measure. Bad values are refused here, before a model is loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = "demo"
    methods: tuple[str, ...] = ("full", "streaming_llm", "sekv", "chess", "freekv", "sentkv", "compresskv")
    tasks: tuple[str, ...] = ("needle", "multikey", "list")
    budgets: tuple[str, ...] = ("5%", "10%", "20%")
    length: int = Field(2048, ge=64)
    prompts: int = Field(25, ge=1)
    first_seed: int = 8_000_000
    minutes: float = Field(60.0, gt=0)
    """stop after this long; what is done is kept and counts"""

    @field_validator("tasks")
    @classmethod
    def _known_tasks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for task in value:
            if task not in NEW_TOKENS:
                raise ValueError(f"unknown task '{task}'; known: {', '.join(NEW_TOKENS)}.")
        return value

    @field_validator("budgets")
    @classmethod
    def _shares(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for budget in value:
            if Budget.parse(budget).unit != "share":
                raise ValueError(f"the table compares shares of full KV (0.1 or 10%), not '{budget}'.")
        return value

    def trials(self) -> Iterator[Trial]:
        """Prompt by prompt, so that an interrupted table has whole prompts."""
        for index in range(self.prompts):
            for task in self.tasks:
                for name in self.methods:
                    for budget in ("",) if name == REFERENCE else self.budgets:
                        yield Trial(task, self.length, index, name, budget)


def measure(request: QualityRequest, kept: Path, report: Callable[[int, int, dict[str, Any]], None]) -> dict[str, Any]:
    """Run what is not in `kept` (one JSON line per trial) yet -> the table with its provenance. report(done, total, row).

    Raises ValueError for an unknown method or a file that does not hold trials.
    """
    for name in request.methods:
        methods.get(name)
    import torch

    from kvlens.engine import Engine
    from kvlens.models import load

    origins = _origins(request)
    rows = _kept_rows(kept, origins)
    seen = {row["key"] for row in rows}
    torch.set_num_threads(1)
    engine = Engine(load(request.model))
    prompts = Prompts(engine, request.first_seed)
    planned = list(request.trials())
    begun = time.monotonic()
    for done, trial in enumerate(planned):
        if trial.key in seen:
            continue
        if time.monotonic() - begun > 60 * request.minutes:
            break
        row = carry_out(engine, prompts, trial) | {"origin": origins[trial.method]}
        rows.append(row)
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        report(done + 1, len(planned), row)
    wanted = {trial.key for trial in planned}
    rows = [row for row in rows if row["key"] in wanted]
    return {"about": _about(request, origins, len(rows), len(planned)), "lines": summarise(rows, request)}


def _kept_rows(kept: Path, origins: dict[str, str]) -> list[dict[str, Any]]:
    """Trials of earlier calls that are still comparable: of this model, these seeds and their method's present parameters. A line cut
    by an interruption is dropped. Raises ValueError for a file of something else."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    text = kept.read_text(encoding="utf-8") if kept.exists() else ""
    lines, rows = text.splitlines(), []
    for place, line in enumerate(lines):
        try:
            row = json.loads(line)
            method, origin = row["method"], row["origin"]
        except (ValueError, KeyError, TypeError):
            if place == len(lines) - 1 and not text.endswith("\n"):
                break
            raise ValueError(f"'{kept.name}' does not hold trials of this benchmark: name another file.") from None
        if origins.get(method) == origin:
            rows.append(row)
    if lines and not text.endswith("\n"):
        kept.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
    return rows


def _origins(request: QualityRequest) -> dict[str, str]:
    """What makes two trials of a method comparable: model weights, seeds, and the method's parameters."""
    from kvlens.models import resolve

    weights = hashlib.sha256()
    for path in sorted(Path(resolve(request.model)).glob("*.safetensors")):
        weights.update(path.read_bytes())
    origins = {}
    for name in request.methods:
        method = methods.get(name)
        parameters = methods.make_parameters(method, settings(method, request.model, "")[0], {})
        said = json.dumps([request.model, weights.hexdigest(), request.first_seed, repr(parameters)])
        origins[name] = hashlib.sha256(said.encode()).hexdigest()[:16]
    return origins


def _about(request: QualityRequest, origins: dict[str, str], done: int, planned: int) -> dict[str, Any]:
    import torch
    import transformers

    presets = {name: settings(methods.get(name), request.model, "")[0] for name in request.methods}
    return {
        "kvlens": __version__, "torch": torch.__version__, "transformers": transformers.__version__, "machine": machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "request": request.model_dump(mode="json"), "depths": DEPTHS,
        "new_tokens": {task: NEW_TOKENS[task] for task in request.tasks}, "presets": presets, "origins": origins,
        "trials": done, "planned": planned,
    }  # fmt: skip


def summarise(rows: list[dict[str, Any]], request: QualityRequest) -> list[dict[str, Any]]:
    """One line per method, budget and task, in the order asked for."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["budget"], row["task"]), []).append(row)
    order = [(trial.method, trial.budget, trial.task) for trial in request.trials() if trial.index == 0]
    out = []
    for name, budget, task in sorted(set(order), key=order.index):
        members = groups.get((name, budget, task), [])
        done = [row for row in members if "exact" in row]
        refused = [row["infeasible"] for row in members if "infeasible" in row]
        line: dict[str, Any] = {"method": name, "budget": budget, "task": task, "n": len(done), "infeasible": len(refused)}
        line["rule"] = members[0]["rule"] if members else None
        line["smallest_feasible"] = float(np.mean(refused)) if refused else None
        if done:
            exact = float(np.mean([row["exact"] for row in done]))
            line |= dict(zip(("exact", "low", "high"), (exact, *wilson(exact, len(done))), strict=True))
            line["attended_share"] = float(np.mean([row["attended_tokens"] / row["prompt_tokens"] for row in done]))
            line["failed_self_checks"] = sum(not row["passed"] for row in done)
            for column in ("score", "coverage", "attended_tokens", "resident_share", "h2d_bytes_per_step", "d2h_bytes_per_step"):
                line[column] = float(np.mean([row[column] for row in done]))
        out.append(line)
    return out


def markdown(result: dict[str, Any]) -> str:
    """The table for the docs: a row per method and budget, a column of exact match per task, then means over the tasks."""
    about, tasks = result["about"], result["about"]["request"]["tasks"]
    lines: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for line in result["lines"]:
        lines.setdefault((line["method"], line["budget"]), {})[line["task"]] = line
    head = ["method", "budget", *(f"{task}: exact (95 %), n" for task in tasks), "coverage", "attended", "resident", "to device per step"]
    text = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (name, budget), by_task in lines.items():
        some = [line for line in by_task.values() if line["n"]]
        of = f"{budget} of attended tokens" if any(line["rule"] == "attended tokens" for line in by_task.values()) else budget or "none"
        cells = [methods.get(name).title, of, *(_cell(by_task.get(task)) for task in tasks)]
        if some:
            weights = [line["n"] for line in some]
            mean = {c: float(np.average([line[c] for line in some], weights=weights)) for c in
                    ("coverage", "attended_share", "resident_share", "h2d_bytes_per_step")}  # fmt: skip
            cells += [f"{mean['coverage']:.2f}", f"{mean['attended_share']:.1%}", f"{mean['resident_share']:.1%}"]
            cells.append(f"{mean['h2d_bytes_per_step'] / 1024:.0f} KiB")
        else:
            cells += ["", "", "", ""]
        text.append(f"| {' | '.join(cells)} |")
    where = about["machine"]["processor"], about["machine"]["cores"]
    text += ["", f"{about['trials']} of {about['planned']} trials, model {about['request']['model']}, {about['request']['length']} tokens, "
             f"{about['date']}, {where[0]}, {where[1]} cores, torch {about['torch']}, transformers {about['transformers']}."]  # fmt: skip
    return "\n".join(text) + "\n"


INTRODUCTION = """# Quality: every method, the same prompts, the same budgets

Made by `kvlens bench quality`; all figures with their provenance are in `benchmarks/results/quality.json` and on the Benchmarks page.

*Budget*: peak bytes of KV on the device inside a decode step, as a share of full KV of prompt and output; everything held counts (slots,
tables, summaries, staging), decoded tokens too. A method whose floor is above the budget is refused, and the cell says what it needs.
CHESS keeps all KV on the device by design, so it is held to the same share of *attended* tokens instead (`keep`). *Exact match* of the
answer with the 95 % Wilson interval and the number of prompts; a list counts when all eight entries are right. *Coverage*: share of full
attention's mass on tokens attended exactly, mean over steps, layers and query heads (rebuilt tokens and summaries do not count).
*Attended*: entries in the softmax that are tokens, share of the prompt. *Resident*: peak, as budgets count it. The last three columns are
means over the tasks, weighted by prompts.

Every method runs with its preset for this model; no preset was chosen on these prompts (docs/fidelity.md says what was chosen on which).
Coverage is not an answer: heads that only look at the first tokens fill it, and one lost needle hardly lowers it.

"""


def document(result: dict[str, Any]) -> str:
    """The page of the docs: what the columns mean, and the table."""
    return INTRODUCTION + markdown(result)


def _cell(line: dict[str, Any] | None) -> str:
    if line is None or not (line["n"] or line["infeasible"]):
        return "not run"
    if not line["n"]:
        return f"infeasible, needs {line['smallest_feasible']:.0%}"
    extra = f" (+{line['infeasible']} infeasible)" if line["infeasible"] else ""
    return f"{line['exact']:.2f} ({line['low']:.2f}-{line['high']:.2f}), {line['n']}{extra}"
