"""What a choice of ours comes to on a real model, where the paper is silent or says otherwise: the same prompts with
the choice and without it, full KV's answer fed token by token.

    python -m kvlens.lab.studies.choices [--model smollm2] [--prompts 12] [--length 1000] [--minutes 5] [--out FILE]

Prompts of kvlens.tasks in the model's chat form, the question known. A prompt that was run stays in the result; the
same command again goes on with the next. docs/evidence/choices.md has what was found.

It is no study of kvlens.studies: it reads the queries of full KV's steps, and feeds its answer to all arms.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlens import methods
from kvlens.budget import Budget
from kvlens.engine.comparison import Reference
from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import load
from kvlens.engine.session import Session
from kvlens.lab.bench.provenance import weights
from kvlens.lab.bench.trialprompts import Prompts
from kvlens.methods.fitting import FIT, Sizes, choose
from kvlens.models.device import machine
from kvlens.statistics import sign_test, wilson

TASKS = ("niah_single", "kv_lookup")
TAUS = (0.8, 0.9)


@dataclass(frozen=True)
class Arm:
    """A method with its preset `fit` and what is set besides."""

    method: str
    set_: dict[str, Any]
    budget: str | None = None

    @property
    def name(self) -> str:
        return f"{self.method} {', '.join(f'{name}={value}' for name, value in self.set_.items())}"


CHESS = {"keep": 0.4}
#: The first of a group is what the others are compared with.
GROUPS = (
    tuple(Arm("sentkv", {"sinks": sinks}, "20%") for sinks in (4, 0)),
    (
        Arm("chess", {**CHESS, "candidates": "all", "centroids": "members"}),
        Arm("chess", {**CHESS, "candidates": "older", "centroids": "members"}),
        Arm("chess", {**CHESS, "candidates": "all", "centroids": "printed"}),
    ),
)


class Queries:
    """Queries of all decode steps that a model makes inside it, post-RoPE: step -> layer -> [Hq, D]."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []
        self._plain = Session.attend

    def __enter__(self) -> Queries:
        plain, visited = self._plain, self.seen

        def attend(session: Session, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
            if session.decoding:
                if layer == 0:
                    visited.append([])
                visited[-1].append(q[0, :, 0].clone())
            return plain(session, layer, q, scaling)

        Session.attend = attend  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Session.attend = self._plain  # type: ignore[method-assign]


def cosines(queries: torch.Tensor, group: int) -> dict[str, float]:
    """queries [T, L, Hq, D]: mean cosine of neighbouring steps, in the first layer and in the others, and the share of
    (step, layer, KV head) whose mean over the group lies below each tau, without the first layer."""
    cosine = torch.cosine_similarity(queries[1:], queries[:-1], dim=-1)
    pooled = cosine[:, 1:].unflatten(-1, (-1, group)).mean(-1)
    below = {f"below {tau}": float((pooled < tau).float().mean()) for tau in TAUS}
    return {"first layer": float(cosine[:, 0].mean()), "other layers": float(cosine[:, 1:].mean()), **below}


def measure_prompt(engine: Engine, prompts: Prompts, task: str, length: int, index: int) -> dict[str, Any]:
    """One prompt under all arms: per arm its divergence from full KV in nats, mean over the answer's tokens, and
    whether each of them stayed the most probable one."""
    request, prompt, read = prompts(task, length, index)
    options = Options(max_new=24)
    with Queries() as queries:
        full = engine.run(
            prompt, methods.get("full"), methods.get("full").Parameters(), options=options, read=read, keep_logits=True
        )
    context = engine.context(prompt, None, options)
    assert context.rotate is not None
    rotated = torch.stack([torch.stack(step) for step in queries.seen])
    positions = context.prompt_tokens + torch.arange(len(rotated))
    plain = context.rotate(rotated.permute(1, 2, 0, 3), positions, back=True).permute(2, 0, 1, 3)
    row: dict[str, Any] = {
        "task": task,
        "index": index,
        "tokens": len(prompt.ids),
        "answers": request.answer in full.text,
    }
    row["cosines"] = {
        "after RoPE": cosines(rotated, context.shape.group),
        "before RoPE": cosines(plain, context.shape.group),
    }
    reference = Reference("", tuple(full.ids), torch.stack(full.logits))
    forced = Options(max_new=len(full.ids), forced=tuple(full.ids))
    row["arms"] = {}
    for arm in (arm for group in GROUPS for arm in group):
        method, limit = methods.get(arm.method), None if arm.budget is None else Budget.parse(arm.budget)
        source = engine.context(prompt, limit, forced)
        sizes = Sizes(source.shape, source.prompt_tokens, source.max_new, source.budget_bytes)
        params = choose(method, FIT, None, arm.set_, sizes).params
        losses = engine.run(prompt, method, params, limit, forced, read=read, against=reference).losses
        sentences = [loss for loss in losses if loss is not None]
        row["arms"][arm.name] = {
            "kl": statistics.fmean(loss.kl for loss in sentences),
            "same": all(loss.agrees for loss in sentences),
        }
    return row


def lines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per arm: n, share of unchanged answers with its Wilson interval, divergence, and the paired difference from the
    group's first arm with its 95 % interval (normal approximation) and the sign test of answers."""
    out = []
    for group in GROUPS:
        for arm in group:
            own_value, start = ([row["arms"][name] for row in rows] for name in (arm.name, group[0].name))
            same = statistics.fmean(each["same"] for each in own_value)
            more = [a["kl"] - b["kl"] for a, b in zip(own_value, start, strict=True)]
            half = 1.96 * statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else math.nan
            better = sum(a["same"] and not b["same"] for a, b in zip(own_value, start, strict=True))
            worse = sum(b["same"] and not a["same"] for a, b in zip(own_value, start, strict=True))
            low, high = wilson(same, len(own_value))
            line = {"arm": arm.name, "n": len(own_value), "same": same, "low": low, "high": high}
            line["kl"] = statistics.fmean(each["kl"] for each in own_value)
            line |= {"kl_more": statistics.fmean(more), "kl_half": half, "better": better, "worse": worse}
            out.append(line | {"p": sign_test(better, worse)})
    for name in ("after RoPE", "before RoPE"):
        parts = [row["cosines"][name] for row in rows]
        out.append(
            {"arm": f"cosines {name}", "n": len(rows)}
            | {key: statistics.fmean(p[key] for p in parts) for key in parts[0]}
        )
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=12, help="of each task")
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=5.0, help="no prompt is begun later")
    parser.add_argument("--out", type=Path, default=Path("kvlens/lab/results/choices.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.exists() else []
    known_names, start_time = {(row["task"], row["index"]) for row in rows}, time.monotonic()
    engine = Engine(load(options.model, "cpu"))
    prompts = Prompts(engine, 9_700_000)
    about = {**machine(), "model": options.model, "weights": weights(options.model), "threads": 1, "question": "known"}
    for index in range(options.prompts):
        for task in TASKS:
            if (task, index) in known_names or time.monotonic() - start_time > 60 * options.minutes:
                continue
            rows.append(measure_prompt(engine, prompts, task, options.length, index))
            print(json.dumps(rows[-1]), flush=True)
            result = {"about": about, "length": options.length, "lines": lines(rows), "rows": rows}
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for line in lines(rows):
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()})


if __name__ == "__main__":
    main()
