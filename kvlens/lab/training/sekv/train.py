"""Training of SeKV's router (SeKV sec. 3.3, appendix A): the model stays frozen, W, tau and g_phi learn.

W starts as the principal directions of the keys of the first document, which the paper leaves open. Everything is a
parameter of `SeKVTraining` and goes into the provenance.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvlens.engine.models import shape_of
from kvlens.lab.training.sekv.files import save_router
from kvlens.lab.training.sekv.routing import learned
from kvlens.lab.training.sekv.settings import SeKVTraining
from kvlens.lab.training.sekv.trainer import Trainer, drawn
from kvlens.methods.sekv import router as sekv_router
from kvlens.methods.sekv.layout import check_dim
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.refusal import Refusal

Progress = Callable[[dict[str, Any]], None]


def train_sekv(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    steps: int,
    documents: Sequence[str | Sequence[int]],
    params: SeKVParameters,
    settings: SeKVTraining | None = None,
    progress: Progress | None = None,
    about: dict[str, Any] | None = None,
) -> Path:
    """Train a router for `model` on `documents` (texts or token ids) into the folder `out`; returns the router's
    safetensors file.

    The same call again continues from `out`/checkpoint.pt. `out`/log.jsonl has one line per step. `about` describes
    model and data in the provenance. Raises ValueError when no document is long enough to have a span outside the
    window, or for pre_rope.
    """
    if params.pre_rope:
        raise ValueError(
            "the router is trained on keys after their rotary embedding: leave pre_rope off, and set it when running."
        )
    settings = settings or SeKVTraining()
    check_dim(params, shape_of(model.config, model.dtype.itemsize).head_dim)
    out.mkdir(parents=True, exist_ok=True)
    model.eval().requires_grad_(False)
    ids = [
        tokenizer(text, add_special_tokens=True)["input_ids"] if isinstance(text, str) else list(text)
        for text in documents
    ]
    held_out = max(1, round(settings.held_out * len(ids)))
    if len(ids) < 2:
        raise ValueError("training needs at least two documents: one of them is held out.")
    training, evaluation = ids[:-held_out], ids[-held_out:]
    first_item = drawn(model, training, settings.lengths[0], params, settings, random.Random(settings.seed))
    if first_item is None:
        raise Refusal(
            f"a document of {settings.lengths[0]} tokens has no span outside the window of {params.window}.",
            code="no_span",
        )
    checkpoint, log = out / "checkpoint.pt", out / "log.jsonl"
    group = first_item.mass.shape[1] // first_item.prefix_keys.shape[1]
    start = sekv_router.fit_pca(first_item.prefix_keys, group, params.dim)
    if settings.routing_steps and not checkpoint.exists():
        start = learned(model, training, start, params, settings, progress)
    trainer = Trainer(model, params, settings, steps, start)
    lines: list[str] = []
    if checkpoint.exists():
        trainer.restore(checkpoint)
        lines = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= trainer.step]
    log.write_text("".join(line + "\n" for line in lines))
    start_time = time.time()
    while trainer.step < steps and trainer.stale < settings.patience:
        figures = trainer.advance(training)
        if trainer.step % settings.evaluate_every == 0 or trainer.step == steps:
            figures |= trainer.evaluate(evaluation)
        with log.open("a") as file:
            file.write(json.dumps({name: round(value, 6) for name, value in figures.items()}) + "\n")
        if trainer.step % settings.evaluate_every == 0 or trainer.step == steps:
            trainer.save(checkpoint)
        if progress:
            progress({**figures, "of": steps, "seconds": round(time.time() - start_time, 1)})
    provenance = {
        "made_by": "kvlens.lab.training.sekv.train",
        "about": about or {},
        "steps": trainer.step,
        "steps_planned": steps,
        "best_step": trainer.best_step,
        "held_out_loss": trainer.best if math.isfinite(trainer.best) else None,
        "documents": {"training": len(training), "held_out": len(evaluation), "tokens": sum(map(len, ids))},
        "parameters": dataclasses.asdict(params),
        "training": dataclasses.asdict(settings),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    path = out / "sekv_router.safetensors"
    save_router(trainer.router(provenance), path)
    return path
