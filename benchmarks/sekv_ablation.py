"""SeKV's parts on the demo model: the rows of the paper's Tables 5 and 7, and what we decided ourselves, each switched
alone.

    python -m benchmarks.sekv_ablation [--prompts 15] [--tasks needle,multikey] [--minutes 25] [--out
    benchmarks/results/sekv_demo.json]

Single runs are kept in runs/sekv_tables.jsonl, so an interrupted benchmark continues. Prompts come from seeds that no
training uses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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

from kvlens import REPOSITORY, methods
from kvlens.bench.intervals import wilson
from kvlens.bench.trials import DEPTHS, NEW_TOKENS, Prompts
from kvlens.demo.tasks import score
from kvlens.engine import models
from kvlens.engine.engine import Engine, Options
from kvlens.kernels.lowrank_bytes import raw_bytes
from kvlens.memory.budget import Budget, BudgetInfeasible
from kvlens.methods.sekv.router import load_router
from kvlens.rows import PrefillRecord, StepRecord

ROUTER = REPOSITORY / "kvlens" / "demo" / "sekv_router.safetensors"
FIRST_SEED = 7_000_000
CELLS = ((1024, "50%"), (2048, "20%"))
"""every arm; at these budgets answers can differ"""
SMALL_CELLS = ((1024, "20%"), (2048, "10%"))
"""the arms of SMALL_ARMS only; 1024 tokens at 10 % are infeasible with the demo preset"""
SMALL_ARMS = ("SeKV", "untrained router", "no reconstruction")
UNLIMITED = (
    "full",
    "no budget",
    "all",
    "all, R_max 8",
    "all, R_max 4",
    "all, pre-RoPE, R_max 8",
    "all, pre-RoPE, R_max 4",
)
"""arms without a budget. 'all': every span is expanded from factors, so that nothing but the reconstruction is left to
fail; long spans only, cut without anchors, since short ones have full rank"""
ALL: dict[str, Any] = {"alpha": 100.0, "tau": 0.0, "form": "factors"}
CHUNK = 40
"""tokens of a fixed chunk: about as many spans as the entropy rule cuts"""


@dataclass(frozen=True)
class Arm:
    """What is switched, and the row of the paper's tables it stands for."""

    row: str
    switches: dict[str, Any] | None
    """parameters over the demo preset; None: the full cache"""


def arms() -> dict[str, Arm]:
    """By name. Table 5's 'w/o surprisal-weighted summaries' and 'mean pooling summary' are one arm: the paper does not
    say how they differ. Table 7 is scaled: R_max to head size 32 (the paper: 8 to 64 of 128), w by halves and doubles
    of the preset's 24."""
    tau = float(load_router(ROUTER, *_shape()).threshold.sigmoid().mean())
    found = {
        "full": Arm("FullKV", None),
        "SeKV": Arm("Table 5: SeKV; Table 7: R_max 16, alpha 1, w 24", {}),
        "fixed chunks": Arm("Table 5: w/o entropy-guided segmentation", {"segmentation": "chunks", "l_max": CHUNK}),
        "no anchors": Arm("Table 5: w/o anchor tokens", {"anchors": False}),
        "uniform means": Arm("Table 5: w/o surprisal-weighted summaries; mean pooling summary", {"weights": "uniform"}),
        "untrained router": Arm("Table 5: w/o trained zoom-in", {"router": "pca"}),
        "no reconstruction": Arm("Table 5: w/o SVD reconstruction", {"zoom": "off"}),
        "one threshold": Arm("Table 5: fixed global threshold", {"tau": tau}),
    }
    found |= {f"R_max {rank}": Arm("Table 7: max rank", {"max_rank": rank}) for rank in (4, 8)}
    found["untrained, R_max 32"] = Arm(
        "Table 7: max rank (the trained gates end at 16)", {"router": "pca", "max_rank": 32}
    )
    found["alpha 2"] = Arm("Table 7: surprisal threshold (the preset's cap on anchors binds)", {"alpha": 2.0})
    found |= {
        f"alpha {alpha:g}, uncapped": Arm(
            "Table 7: surprisal threshold, no cap on anchors", {"alpha": alpha, "anchor_share": 1.0}
        )
        for alpha in (0.5, 1.0, 1.5, 2.0)
    }
    found |= {f"w {window}": Arm("Table 7: local window", {"window": window}) for window in (12, 48)}
    alone: dict[str, dict[str, Any]] = {
        "all": {},
        "all, R_max 8": {"max_rank": 8},
        "all, R_max 4": {"max_rank": 4},
        "all, pre-RoPE, R_max 8": {"max_rank": 8, "pre_rope": True},
        "all, pre-RoPE, R_max 4": {"max_rank": 4, "pre_rope": True},
    }
    return found | {
        "pre-RoPE": Arm("ours: key space", {"pre_rope": True}),
        "untrained, pre-RoPE": Arm("ours: key space", {"router": "pca", "pre_rope": True}),
        "factors only": Arm("ours: form in host memory", {"form": "factors"}),
        "exact spans": Arm("ours: form in host memory", {"form": "raw"}),
        "no budget": Arm("ours: SeKV without a limit", {}),
        **{name: Arm("ours: reconstruction alone", {**ALL, **switches}) for name, switches in alone.items()},
    }


def _shape() -> tuple[int, int, int]:
    config = json.loads((Path(models.resolve("demo")) / "config.json").read_text())
    return config["num_hidden_layers"], config["num_attention_heads"], config["head_dim"]


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


@dataclass(frozen=True)
class Case:
    """One run of the benchmark."""

    task: str
    length: int
    budget: str
    """share of full KV, or 'none'"""
    index: int
    arm: str

    @property
    def key(self) -> str:
        return f"{self.task}/{self.length}/{self.budget}/{self.index}/{self.arm}"


def cases(tasks: list[str], prompts: int, names: list[str]) -> Iterator[Case]:
    """Prompt by prompt, so that an interrupted benchmark has whole prompts and each is read once."""
    for index in range(prompts):
        for task in tasks:
            for cell, small in zip(CELLS, SMALL_CELLS, strict=True):
                yield from (Case(task, cell[0], "none", index, name) for name in names if name in UNLIMITED)
                yield from (Case(task, *cell, index, name) for name in names if name not in UNLIMITED)
                yield from (Case(task, *small, index, name) for name in names if name in SMALL_ARMS)


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
    wanted = answer.strip().rstrip(".")
    return sum(a == b for a, b in zip(wanted, output.strip(), strict=False)) / len(wanted)


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per task, length, budget and arm: n, exact match with its Wilson interval, means of the rest."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["length"], row["budget"], row["arm"], row["task"]), []).append(row)
    out, order = [], list(arms())
    for (length, budget, arm, task), members in sorted(
        groups.items(), key=lambda g: (*g[0][:2], order.index(g[0][2]), g[0][3])
    ):
        done = [row for row in members if "exact" in row]
        line: dict[str, Any] = {"task": task, "length": length, "budget": budget, "arm": arm, "n": len(done)}
        line["infeasible"] = len(members) - len(done)
        if done:
            line["exact"] = float(np.mean([row["exact"] for row in done]))
            line["low"], line["high"] = wilson(line["exact"], len(done))
            for name in [name for name in done[0] if name not in ("key", "exact", *Case.__dataclass_fields__)]:
                values = [row[name] for row in done if row[name] is not None]
                line[name] = float(np.mean(values)) if values else None
        out.append(line)
    return out


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: both tasks in one row, exact match apart, the other figures as means over both."""
    tasks = sorted({line["task"] for line in lines})
    columns = (
        "tokens",
        "budget",
        "arm",
        *(f"{task}: exact (95 %), n" for task in tasks),
        "characters",
        "zoom rate",
        "coverage",
        "spans",
        "rank K / V",
        "error K / V",
        "stored / raw",
        "lie raw",
        "moved per step",
    )
    text = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for place in dict.fromkeys((line["length"], line["budget"], line["arm"]) for line in lines):
        of = {line["task"]: line for line in lines if (line["length"], line["budget"], line["arm"]) == place}
        done = [line for line in of.values() if line["n"]]

        def mean(name: str, form: str, done: list[dict[str, Any]] = done) -> str:
            values = [line[name] for line in done if line.get(name) is not None]
            return format(float(np.mean(values)), form) if values else ""

        stored, raw = mean("span_bytes", ".0f"), mean("raw_bytes", ".0f")
        held = bool(raw) and float(raw) > 0
        pairs = [
            " / ".join(filter(None, (mean(f"{name}_{x}", form) for x in "kv")))
            for name, form in (("rank", ".1f"), ("err", ".2f"))
        ]
        cells = [str(place[0]), str(place[1]), place[2], *(_exact(of.get(task)) for task in tasks)]
        cells += [
            mean("characters", ".2f"),
            mean("zoom_rate", ".3f"),
            mean("coverage", ".2f"),
            mean("spans", ".0f") if held else "",
            *pairs,
        ]
        cells += [f"{float(stored) / float(raw):.2f}" if held else "", mean("raw_share", ".2f")]
        cells += [f"{float(mean('h2d_bytes_per_step', '.1f')) / 1024:.0f} KiB" if done else ""]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def _exact(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    refused = f" (+{line['infeasible']} infeasible)" if line["infeasible"] and line["n"] else ""
    return (
        f"{line['exact']:.2f} ({line['low']:.2f}-{line['high']:.2f}), {line['n']}{refused}"
        if line["n"]
        else "infeasible"
    )


def about() -> dict[str, Any]:
    """Machine, versions, model and router."""
    names = [
        x.split(":", 1)[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")
    ]
    digest = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in (Path(models.resolve("demo")) / "model.safetensors", ROUTER)
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
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sekv_demo.json"))
    parser.add_argument("--runs", type=Path, default=Path("runs/sekv_tables.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.runs.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in arguments.runs.read_text().splitlines()] if arguments.runs.exists() else []
    seen, found = {row["key"] for row in rows}, arms()
    engine = Engine(models.load("demo"))
    prompts = Prompts(engine, FIRST_SEED)
    begun = time.monotonic()
    for case in cases(arguments.tasks.split(","), arguments.prompts, list(found)):
        if case.key in seen:
            continue
        if time.monotonic() - begun > 60 * arguments.minutes:
            break
        rows.append(run(engine, prompts, case, found[case.arm].switches))
        with arguments.runs.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    lines = summarise(rows)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    listed = {name: {"row": arm.row, "switches": arm.switches} for name, arm in found.items()}
    arguments.out.write_text(json.dumps({"about": about(), "arms": listed, "lines": lines}, indent=1) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
