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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvlens.engine.models import shape_of
from kvlens.lab.training.sekv.examples import draw, read
from kvlens.lab.training.sekv.files import save_router
from kvlens.lab.training.sekv.routing import learned
from kvlens.lab.training.sekv.settings import SeKVTraining
from kvlens.lab.training.sekv.trainer import Trainer
from kvlens.methods.sekv import router as sekv_router
from kvlens.methods.sekv.layout import check_dim
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.refusal import Refusal

Progress = Callable[[dict[str, Any]], None]
CHECKPOINT = "checkpoint.pt"
CHECKPOINT_SECONDS = 30


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
    seconds: float | None = None,
) -> Path:
    """Train a router for `model` on `documents` (texts or token ids) into the folder `out`; returns the router's
    safetensors file.

    The same call again continues from `out`/checkpoint.pt, which is saved at least every 30 seconds, with the router of
    the best state so far beside it. `out`/log.jsonl has one line per step. `about` describes model and data in the
    provenance. seconds: the training stops after so many, whatever step it is at; None: it does not. Raises ValueError
    when no document is long enough to have a span outside the window, or for pre_rope.
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
    trainer = Trainer(
        model, params, settings, steps, _start(model, training, params, settings, out, progress), progress
    )
    path, run = out / "sekv_router.safetensors", _Run(trainer, out, steps, seconds, progress)

    def write() -> None:
        provenance = _provenance(trainer, steps, about or {}, model.device)
        provenance["documents"] = {"training": len(training), "held_out": len(evaluation), "tokens": sum(map(len, ids))}
        save_router(trainer.router(provenance), path)

    with _tensor_cores(settings.tensor_cores):
        run.go(training, evaluation, write)
    return path


@contextmanager
def _tensor_cores(allowed: bool) -> Iterator[None]:
    """Inside, products of float32 numbers on a CUDA device may be made in TF32. Others do not change."""
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous


def _start(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    params: SeKVParameters,
    settings: SeKVTraining,
    out: Path,
    progress: Progress | None,
) -> Tensor:
    """Return W to begin with [L, H, d', D]: the principal directions of the keys of the first place."""
    length = settings.lengths[0]
    ids = draw(documents, length, random.Random(settings.seed))
    cap = int(params.anchor_share * settings.budget * length)
    first_item = read(model, ids, settings.suffix, params, cap)
    if first_item is None:
        raise Refusal(
            f"a document of {length} tokens has no span outside the window of {params.window}.", code="no_span"
        )
    group = first_item.query.shape[1] // first_item.keys.shape[1]
    start = sekv_router.fit_pca(first_item.keys[:, :, : length - settings.suffix], group, params.dim)
    if settings.routing_steps and not (out / CHECKPOINT).exists():
        start = learned(model, documents, start, params, settings, progress)
    return start


class _Run:
    """Steps until the last one, until nothing improves or until the time is over; writes log and checkpoints."""

    def __init__(
        self, trainer: Trainer, out: Path, steps: int, seconds: float | None, progress: Progress | None
    ) -> None:
        self.trainer, self.steps, self.progress = trainer, steps, progress
        self._checkpoint, self._log = out / CHECKPOINT, out / "log.jsonl"
        self._start = self._saved = time.monotonic()
        self._end = math.inf if seconds is None else self._start + seconds
        lines: list[str] = []
        if self._checkpoint.exists():
            trainer.restore(self._checkpoint)
            lines = [line for line in self._log.read_text().splitlines() if json.loads(line)["step"] <= trainer.step]
        self._log.write_text("".join(line + "\n" for line in lines))
        self._before = trainer.seconds

    def go(
        self, training: Sequence[Sequence[int]], evaluation: Sequence[Sequence[int]], write: Callable[[], None]
    ) -> None:
        """Train; write: called whenever a checkpoint was saved, at the end too."""
        trainer, settings = self.trainer, self.trainer.settings
        while trainer.step < self.steps and trainer.stale < settings.patience and time.monotonic() < self._end:
            figures = trainer.advance(training)
            evaluated = trainer.step % settings.evaluate_every == 0 or trainer.step == self.steps
            if evaluated:
                figures |= trainer.evaluate(evaluation)
            trainer.seconds = self._before + time.monotonic() - self._start
            with self._log.open("a") as file:
                file.write(json.dumps({name: round(value, 6) for name, value in figures.items()}) + "\n")
            if evaluated or time.monotonic() - self._saved > CHECKPOINT_SECONDS:
                self._save(write)
            if self.progress:
                self.progress({**figures, "of": self.steps, "seconds": round(trainer.seconds, 1)})
        self._save(write)

    def _save(self, write: Callable[[], None]) -> None:
        self.trainer.save(self._checkpoint)
        write()
        self._saved = time.monotonic()


def _provenance(trainer: Trainer, steps: int, about: dict[str, Any], device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "made_by": "kvlens.lab.training.sekv.train",
        "about": about,
        "steps": trainer.step,
        "steps_planned": steps,
        "best_step": trainer.best_step,
        "held_out_loss": trainer.best if math.isfinite(trainer.best) else None,
        "parameters": dataclasses.asdict(trainer.params),
        "training": dataclasses.asdict(trainer.settings),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(trainer.seconds, 1),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
