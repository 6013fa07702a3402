"""SeKV's parts on the demo model: the rows of the paper's Tables 5 and 7, and what we decided ourselves, each switched
alone.

    python -m kvlens.lab.studies.sekv_ablation [--prompts 15] [--tasks needle,multikey] [--minutes 25] [--out
    kvlens/lab/results/sekv_demo.json]

Single runs are kept in runs/sekv_tables.jsonl, so an interrupted benchmark continues. Prompts come from seeds that no
training uses.

It is no study of kvlens.studies: it reads the errors of factors from the records of prefill.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.demo.tasks import score
from kvlens.engine import models
from kvlens.engine.engine import Engine, Options
from kvlens.kernels.lowrank_bytes import raw_bytes
from kvlens.lab.bench.trialprompts import DEPTHS, Prompts
from kvlens.lab.bench.trials import NEW_TOKENS
from kvlens.lab.studies.sekv_arms import Case, arms, cases
from kvlens.lab.studies.sekv_table import summarise, table
from kvlens.methods.sekv.trained import SHIPPED
from kvlens.records import PrefillRecord, StepRecord

FIRST_SEED = 7_000_000


class Figures:
    """A sink that keeps the means of what it sees."""

    def __init__(self, head_dim: int, itemsize: int) -> None:
        self.size = (head_dim, itemsize)
        self.spans: dict[str, float | None] = {}
        self.zoom: list[float] = []
        self.coverage: list[float] = []
        self.recalled: list[float] = []

    def prefill(self, record: PrefillRecord) -> None:
        """Spans in host memory, means over spans and KV heads. Ranks: what the gates keep, also where the span lies
        raw; errors: of what lies as factors."""
        tokens = {span.span: span.tok_end - span.tok_start for span in record.spans}
        noted = {
            name: [row.values for row in record.journal if row.name == name]
            for name in {row.name for row in record.journal}
        }
        errors = {
            name: [e for row in record.span_heads if (e := getattr(row, name)) is not None]
            for name in ("err_k", "err_v")
        }
        self.spans = {
            "spans": float(len({row.span for row in record.span_heads})),
            "span_bytes": float(sum(row.cold_bytes for row in record.span_heads)),
            "raw_bytes": float(sum(raw_bytes(tokens[row.span], *self.size) for row in record.span_heads)),
            "raw_share": float(np.mean([row.form == "raw" for row in record.span_heads]))
            if record.span_heads
            else None,
        }
        for name in ("rank_k", "rank_v", "rank_k_post_rope", "err_k_pre_rope", "err_k_post_rope"):
            self.spans[name] = float(np.concatenate(noted[name]).mean()) if name in noted else None
        self.spans |= {name: float(np.mean(values)) if values else None for name, values in errors.items()}

    def step(self, record: StepRecord) -> None:
        for name, values in (("zoom_rate", self.zoom), ("coverage", self.coverage)):
            if name in record.head and not np.isnan(record.head[name]).all():
                values.append(float(np.nanmean(record.head[name])))
        self.recalled.append(float(sum(t.bytes for t in record.transfers if t.direction == "h2d")))


def run(engine: Engine, prompts: Prompts, case: Case, switches: dict[str, Any] | None) -> dict[str, Any]:
    """Generate one answer; what is written down of it."""
    source, prompt, read = prompts(case.task, case.length, case.index)
    shape, new = engine.loaded.shape, NEW_TOKENS[case.task]
    method = methods.get("full" if switches is None else "sekv")
    params = methods.make_parameters(method, None if switches is None else "demo", switches or {})
    sink = Figures(shape.head_dim, shape.itemsize)
    budget = None if case.budget == "none" else Budget.parse(case.budget)
    row: dict[str, Any] = {"key": case.key, **vars(case)}
    try:
        result = engine.run(prompt, method, params, budget, Options(max_new=new, coverage=True), sink, read=read)
    except BudgetInfeasible as error:
        return row | {"infeasible": round(error.smallest / error.full, 4)}
    full = shape.full_kv_bytes(len(prompt.ids) + new)
    return row | {
        "exact": float(score(case.task, source.answer, result.text)),
        "characters": characters(source.answer, result.text),
        "zoom_rate": float(np.mean(sink.zoom)) if sink.zoom else None,
        "coverage": float(np.mean(sink.coverage)) if sink.coverage else None,
        "h2d_bytes_per_step": float(np.mean(sink.recalled)),
        "peak_share": result.peak_bytes / full,
        **sink.spans,
    }


def characters(answer: str, output: str) -> float:
    """Share of the answer's characters that stand at their place."""
    target = answer.strip().rstrip(".")
    return sum(a == b for a, b in zip(target, output.strip(), strict=False)) / len(target)


def about() -> dict[str, Any]:
    """Machine, versions, model and router."""
    names = [
        x.split(":", 1)[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")
    ]
    digest = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in (Path(models.resolve("demo")) / "model.safetensors", SHIPPED["demo"])
    }
    return {
        "machine": (
            f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, one thread, load "
            f"{os.getloadavg()[0]:.1f}"
        ),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "sha256": digest,
        "first_seed": FIRST_SEED,
        "depths": DEPTHS,
        "preset": methods.get("sekv").presets["demo"],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--tasks", default="needle,multikey")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long; what is done counts")
    parser.add_argument("--out", type=Path, default=Path("kvlens/lab/results/sekv_demo.json"))
    parser.add_argument("--runs", type=Path, default=Path("runs/sekv_tables.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.runs.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in arguments.runs.read_text().splitlines()] if arguments.runs.exists() else []
    visited, results = {row["key"] for row in rows}, arms()
    engine = Engine(models.load("demo"))
    prompts = Prompts(engine, FIRST_SEED)
    start_time = time.monotonic()
    for case in cases(arguments.tasks.split(","), arguments.prompts, list(results)):
        if case.key in visited:
            continue
        if time.monotonic() - start_time > 60 * arguments.minutes:
            break
        rows.append(run(engine, prompts, case, results[case.arm].switches))
        with arguments.runs.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    lines = summarise(rows)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    listed = {name: {"row": arm.row, "switches": arm.switches} for name, arm in results.items()}
    arguments.out.write_text(json.dumps({"about": about(), "arms": listed, "lines": lines}, indent=1) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
