"""SeKV's parts on the demo model: exact match, zoom rate and coverage with and without each, at two budgets.

    python -m benchmarks.sekv_ablation [--prompts 30] [--tasks needle,multikey] [--out benchmarks/results/sekv_demo.json]

Single runs are kept in runs/sekv_ablation.jsonl, so an interrupted benchmark continues. Prompts come from seeds that no training uses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kvlens import methods, models
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.demo.tasks import make_prompt, score
from kvlens.engine import Engine, Options
from kvlens.methods.sekv_router import load_router
from kvlens.prompts import PromptText, tokenize
from kvlens.rows import PrefillRecord, SelfCheck, StepRecord

ROUTER = Path(models.__file__).parent / "demo" / "sekv_router.safetensors"
FIRST_SEED = 7_000_000
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CELLS = ((1024, "20%"), (1024, "50%"), (2048, "10%"), (2048, "20%"))
"""1024 tokens at 10 % are infeasible with the demo preset: summaries, window and one expanded span need about 16 %."""
NEW_TOKENS = {"needle": 12, "multikey": 12, "chain": 80, "note": 48, "list": 110}


def arms() -> dict[str, dict[str, Any] | None]:
    """What is switched in each arm; None is the full cache. Expansion without reconstruction is the arm 'no zoom' (a test shows it)."""
    tau = float(load_router(ROUTER, *_shape()).threshold.sigmoid().mean())
    return {
        "full": None,
        "trained": {},
        "pca": {"router": "pca"},
        "no zoom": {"zoom": "off"},
        "no budget": {},
        "exact spans": {"form": "raw"},
        "no anchors": {"anchors": False},
        "one threshold": {"tau": tau},
    }


def _shape() -> tuple[int, int, int]:
    config = json.loads((Path(models.resolve("demo")) / "config.json").read_text())
    return config["num_hidden_layers"], config["num_attention_heads"], config["head_dim"]


class Figures:
    """A sink that keeps the means of what it sees."""

    def __init__(self) -> None:
        self.zoom: list[float] = []
        self.coverage: list[float] = []
        self.recalled: list[float] = []

    def begin(self, meta: dict[str, Any]) -> None:
        """Nothing to keep."""

    def prefill(self, record: PrefillRecord) -> None:
        """Nothing to keep."""

    def step(self, record: StepRecord) -> None:
        for name, values in (("zoom_rate", self.zoom), ("coverage", self.coverage)):
            if name in record.head and not np.isnan(record.head[name]).all():
                values.append(float(np.nanmean(record.head[name])))
        self.recalled.append(float(sum(t.bytes for t in record.transfers if t.direction == "h2d")))

    def finish(self, status: str, error: str | None, checks: list[SelfCheck], extra: dict[str, Any]) -> None:
        """Nothing to keep."""


@dataclass(frozen=True)
class Case:
    """One run of the benchmark."""

    task: str
    length: int
    budget: str
    index: int
    arm: str

    @property
    def key(self) -> str:
        return f"{self.task}/{self.length}/{self.budget}/{self.index}/{self.arm}"


def cases(tasks: list[str], prompts: int, names: list[str]) -> Iterator[Case]:
    """Prompt by prompt, so that an interrupted benchmark has whole prompts."""
    for index in range(prompts):
        for task in tasks:
            for length, budget in CELLS:
                for arm in names:
                    if arm not in ("full", "no budget") or budget == "20%":
                        yield Case(task, length, budget, index, arm)


def run(engine: Engine, case: Case, overrides: dict[str, Any] | None) -> dict[str, Any]:
    """Generate one answer; what is written down of it."""
    loaded = engine.loaded
    source = make_prompt(
        case.task, case.length, DEPTHS[case.index % len(DEPTHS)], FIRST_SEED + case.index,
        lambda text: loaded.tokenizer.encode(text, add_special_tokens=False),
    )  # fmt: skip
    new = NEW_TOKENS[case.task]
    prompt = tokenize(PromptText(source.text), loaded.tokenizer, loaded.max_positions, new)
    method = methods.get("full" if overrides is None else "sekv")
    params = methods.make_parameters(method, None if overrides is None else "demo", overrides or {})
    sink = Figures()
    budget = None if case.arm in ("full", "no budget") else Budget.parse(case.budget)
    row: dict[str, Any] = {"key": case.key, **vars(case)}
    try:
        result = engine.run(prompt, method, params, budget, Options(max_new=new, coverage=True), sink)
    except BudgetInfeasible as error:
        return row | {"infeasible": round(error.smallest / error.full, 4)}
    full = loaded.shape.full_kv_bytes(len(prompt.ids) + new)
    return row | {
        "exact": score(case.task, source.answer, result.text),
        "characters": characters(source.answer, result.text),
        "zoom_rate": float(np.mean(sink.zoom)) if sink.zoom else None,
        "coverage": float(np.mean(sink.coverage)) if sink.coverage else None,
        "h2d_bytes_per_step": float(np.mean(sink.recalled)),
        "peak_share": result.peak_bytes / full,
    }


def characters(answer: str, output: str) -> float:
    """Share of the answer's characters that stand at their place."""
    wanted = answer.strip().rstrip(".")
    return sum(a == b for a, b in zip(wanted, output.strip(), strict=False)) / len(wanted)


def wilson(mean: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share."""
    centre, half = mean + z * z / (2 * n), z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, centre - half) / (1 + z * z / n), min(1.0, (centre + half) / (1 + z * z / n))


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per task, length, budget and arm."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["length"], row["budget"], row["arm"]), []).append(row)
    out = []
    order = list(arms())
    for (task, length, budget, arm), members in sorted(groups.items(), key=lambda g: (*g[0][:3], order.index(g[0][3]))):
        done = [row for row in members if "exact" in row]
        line: dict[str, Any] = {"task": task, "length": length, "budget": budget, "arm": arm, "n": len(done)}
        line["infeasible"] = len(members) - len(done)
        if done:
            line["exact"] = float(np.mean([row["exact"] for row in done]))
            line["low"], line["high"] = wilson(line["exact"], len(done))
            for name in ("characters", "zoom_rate", "coverage", "h2d_bytes_per_step", "peak_share"):
                values = [row[name] for row in done if row[name] is not None]
                line[name] = float(np.mean(values)) if values else None
        out.append(line)
    return out


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown."""
    columns = ("task", "tokens", "budget", "arm", "n", "exact match (95 %)", "characters", "zoom rate", "coverage", "moved per step")
    head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    text = [head]
    for line in lines:
        name = f"| {line['task']} | {line['length']} | {line['budget']} | {line['arm']} | {line['n']} |"
        if not line["n"]:
            text.append(f"{name} infeasible | | | | |")
            continue
        show = {k: "" if line[k] is None else f"{line[k]:.3f}" for k in ("zoom_rate", "coverage")}
        moved = f"{line['h2d_bytes_per_step'] / 1024:.0f} KiB"
        exact = f"{line['exact']:.2f} ({line['low']:.2f}-{line['high']:.2f})"
        text.append(f"{name} {exact} | {line['characters']:.2f} | {show['zoom_rate']} | {show['coverage']} | {moved} |")
    return "\n".join(text)


def about() -> dict[str, Any]:
    """Machine, versions, model and router."""
    names = [x.split(":", 1)[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    digest = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (Path(models.resolve("demo")) / "model.safetensors", ROUTER)}
    return {
        "machine": f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, one thread, load {os.getloadavg()[0]:.1f}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "sha256": digest, "first_seed": FIRST_SEED, "depths": DEPTHS, "preset": methods.get("sekv").presets["demo"],
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--tasks", default="needle,multikey")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long; what is done counts")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sekv_demo.json"))
    parser.add_argument("--runs", type=Path, default=Path("runs/sekv_ablation.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.runs.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in arguments.runs.read_text().splitlines()] if arguments.runs.exists() else []
    seen, switches = {row["key"] for row in rows}, arms()
    engine = Engine(models.load("demo"))
    begun = time.monotonic()
    for case in cases(arguments.tasks.split(","), arguments.prompts, list(switches)):
        if case.key in seen:
            continue
        if time.monotonic() - begun > 60 * arguments.minutes:
            break
        rows.append(run(engine, case, switches[case.arm]))
        with arguments.runs.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    lines = summarise(rows)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"about": about(), "arms": switches, "lines": lines}, indent=1) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
