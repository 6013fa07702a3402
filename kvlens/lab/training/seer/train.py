"""Training of SeerAttention-R's gate (arXiv 2506.08889, sec. 2.4): the divergence of the gate's shares of blocks from
the model's own, for all layers and KV heads at once. The model is read once for each document."""

from __future__ import annotations

import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from kvlens.engine.models import LoadedModel
from kvlens.lab.training.seer.examples import Example, read_example
from kvlens.methods.seer.gate import Gate, draw_gate, gate_keys, gate_queries, gate_scores
from kvlens.refusal import Refusal

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class SeerTraining:
    """Settings of a training; the paper's where it gives one."""

    page: int = 16
    """tokens of a block (the paper: 64)"""
    length: int = 2048
    """tokens of a document"""
    windows: int = 2
    """of that length that are drawn of a document, where it is as long as all of them"""
    queries: int = 256
    """drawn positions of a document that the gate learns from (the paper: all)"""
    steps: int = 1000
    """optimizer steps, a document each (the paper: 800 of 16 documents)"""
    learning_rate: float = 1e-2
    """at first, falling as a cosine (the paper: 1e-3, sec. 4.1)"""
    held_out: float = 0.15
    """share of the documents that the gate does not learn from"""
    best: float = 0.125
    """share of a query's blocks that its recall counts"""
    seed: int = 0


def scores(gate: Gate, example: Example, page: int) -> Tensor:
    """Return the gate's logits [L, H_kv, T, P], -inf for blocks that were not full before the query."""
    pooled, queries = example.pooled.float(), example.queries.float()
    keys = gate_keys(gate.key, pooled, torch.arange(pooled.shape[2]) * page)
    logits = gate_scores(gate_queries(gate.query, queries, example.positions), keys)
    return logits.masked_fill(~example.full(page), float("-inf"))


def divergence(logits: Tensor, shares: Tensor) -> Tensor:
    """Return KL(shares || softmax(logits)) in nats, mean over layers, KV heads and queries."""
    log_shares = shares.clamp_min(1e-9).log()
    gap = log_shares - logits.log_softmax(-1)
    return torch.where(shares > 0, shares * gap, 0.0).sum(-1).mean()


def recall(ranking: Tensor, shares: Tensor, full: Tensor, best: float) -> Tensor:
    """Return the share of each query's truly best blocks that are best by `ranking`, mean over all. The best are so
    many as `best` of the query's full blocks."""
    count = (full.sum(-1) * best).floor().clamp(min=1)
    places = [x.masked_fill(~full, float("-inf")).argsort(-1, descending=True).argsort(-1) for x in (ranking, shares)]
    best_ranked, best_true = (place < count[:, None] for place in places)
    return ((best_ranked & best_true).sum(-1) / count).mean()


@torch.no_grad()
def measure(gate: Gate, examples: Sequence[Example], settings: SeerTraining) -> dict[str, float]:
    """Return loss and recall over held-out documents, and the recall of Quest's bound on the same queries."""
    rows = []
    for example in examples:
        shares, full = example.shares.float(), example.full(settings.page)
        logits = scores(gate, example, settings.page)
        rows.append(
            (
                divergence(logits, shares),
                recall(logits, shares, full, settings.best),
                recall(example.bounds.float(), shares, full, settings.best),
            )
        )
    loss, gate_recall, bound_recall = torch.tensor(rows).mean(0).tolist()
    return {"loss": round(loss, 4), "recall": round(gate_recall, 4), "recall_of_quest": round(bound_recall, 4)}


def learn(examples: Sequence[Example], gate: Gate, settings: SeerTraining, report: Report) -> Gate:
    """Return the gate after `settings.steps` steps, a drawn document each."""
    weights = [x.clone().requires_grad_() for x in (gate.query, gate.key)]
    learner = torch.optim.AdamW(weights, lr=settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(learner, settings.steps)
    rng = random.Random(settings.seed)
    for step in range(1, settings.steps + 1):
        example = examples[rng.randrange(len(examples))]
        loss = divergence(scores(Gate(*weights), example, settings.page), example.shares.float())
        learner.zero_grad()
        loss.backward()
        learner.step()
        schedule.step()
        if step % max(1, settings.steps // 20) == 0:
            report({"step": step, "of": settings.steps, "loss": float(loss.detach())})
    return Gate(*(weight.detach() for weight in weights))


def train_seer(
    loaded: LoadedModel,
    documents: Sequence[str | Sequence[int]],
    out: Path,
    settings: SeerTraining,
    report: Report = lambda figures: None,
    about: dict[str, Any] | None = None,
) -> Path:
    """Train a gate for `loaded` on documents (texts or token ids) and write `out`, a .safetensors file in float16, with
    a .json file of its origin beside it. Raises ValueError for another kind of file, Refusal (`too_few_documents`) for
    fewer than two documents of `settings.length` tokens."""
    if out.suffix != ".safetensors":
        raise ValueError(f"'{out.name}' holds a gate: give it a name that ends with .safetensors.")
    started, rng = (time.monotonic(), time.process_time()), random.Random(settings.seed)
    by_document = draw_windows(loaded, documents, settings, rng)
    if len(by_document) < 2:
        raise Refusal(
            f"training needs at least two documents of {settings.length:,} tokens, and {len(by_document)} are as long: "
            "give longer texts or a smaller length.",
            code="too_few_documents",
            documents=len(by_document),
            length=settings.length,
        )
    examples: list[list[Example]] = []
    for number, windows in enumerate(by_document, 1):
        examples.append([read_example(loaded, ids, settings.page, settings.queries, rng) for ids in windows])
        report({"documents": number, "of": len(by_document)})
    held = max(1, round(settings.held_out * len(examples)))
    training, held_out = (list(chain(*part)) for part in (examples[:-held], examples[-held:]))
    drawn = draw_gate(loaded.shape, settings.seed)
    gate = learn(training, drawn, settings, report)
    stored = {"query": gate.query.half().contiguous(), "key": gate.key.half().contiguous()}
    half_gate = Gate(stored["query"].float(), stored["key"].float())
    figures = {"untrained": measure(drawn, held_out, settings), "trained": measure(half_gate, held_out, settings)}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(stored, out)
    origin = {
        "made_by": "kvlens.lab.training.seer.train",
        "method": "seer",
        "model": loaded.name,
        "layers": loaded.shape.layers,
        "q_heads": loaded.shape.q_heads,
        "page": settings.page,
        "training": asdict(settings),
        "documents": {
            "training": len(by_document) - held,
            "held_out": held,
            "windows": len(training),
            "held_out_windows": len(held_out),
            "tokens": settings.length * (len(training) + len(held_out)),
            "queries": sum(len(example.positions) for example in training),
            "held_out_queries": sum(len(example.positions) for example in held_out),
        },
        "held_out": figures,
        "about": about or {},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(time.monotonic() - started[0], 1),
        "cpu_seconds": round(time.process_time() - started[1], 1),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    out.with_suffix(".json").write_text(json.dumps(origin, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    report(figures)
    return out


def draw_windows(
    loaded: LoadedModel, documents: Sequence[str | Sequence[int]], settings: SeerTraining, rng: random.Random
) -> list[list[list[int]]]:
    """Return up to `settings.windows` windows of each document that is as long as one, from drawn places of equal parts
    of it."""
    drawn = []
    for document in documents:
        ids = loaded.tokenizer(document)["input_ids"] if isinstance(document, str) else list(document)
        count = min(settings.windows, len(ids) // settings.length)
        parts = [list(ids[len(ids) * i // count : len(ids) * (i + 1) // count]) for i in range(count)]
        starts = [rng.randrange(len(part) - settings.length + 1) for part in parts]
        if parts:
            drawn.append([part[a : a + settings.length] for part, a in zip(parts, starts, strict=True)])
    return drawn
