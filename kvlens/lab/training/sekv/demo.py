"""Train SeKV's router for the demo model: `python -m kvlens.lab.training.sekv.demo --out DIR`, then install it
beside the method.

The documents are drawn as the demo model's own training rows are (documents with questions at their end, and real
English), from seeds of their own. So, unlike the paper's corpus, they contain the kind of question the demo asks; no
document of a benchmark or of the demo's prompts is among them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from kvlens import methods
from kvlens.engine import models
from kvlens.lab.training.demo import english
from kvlens.lab.training.demo.rows import RowMaker
from kvlens.lab.training.demo.tokenizer import Encoder
from kvlens.lab.training.sekv.settings import SeKVTraining
from kvlens.lab.training.sekv.train import Progress, train_sekv

ROUTER = Path(__file__).parents[1] / "demo.safetensors"
SEED = 77_000_000
LENGTHS = (1024, 2048, 2048)
REAL_ENGLISH = 0.25


def documents(maker: RowMaker, count: int, seed: int = SEED) -> list[list[int]]:
    """Token ids of `count` documents of the lengths of the curriculum, without padding; the share of each as in the
    curriculum."""
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        length = rng.choice(LENGTHS)
        row = maker.english_row(rng, length) if rng.random() < REAL_ENGLISH else maker.task_row(rng, length)
        ids = row.ids
        while ids[-1] == 0:
            ids.pop()
        out.append(ids)
    return out


def settings(batch: int) -> SeKVTraining:
    """The paper's training scaled to the demo; what differs is in the provenance."""
    return SeKVTraining(batch=batch, lengths=LENGTHS, suffix=64, learning_rate=2e-2, gate_rate=0.05, evaluate_on=4)


def train_router(
    out: Path, steps: int = 360, batch: int = 1, count: int = 300, model: str = "demo", progress: Progress | None = None
) -> Path:
    """Train on `count` generated documents into the folder `out`; returns the router's safetensors file.

    `model`: another state of the demo model; its router is not installed beside the model. Continues a training cut off
    in `out`.
    """
    torch.set_num_threads(1)
    loaded = models.load(model)
    maker = RowMaker(Encoder(loaded.tokenizer), english.split(english.collect())[0])
    weights = Path(models.resolve(model)) / "model.safetensors"
    about: dict[str, Any] = {
        "model": "demo",
        "model_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "documents": "kvlens/lab/training/sekv/demo.py: rows of the demo language with questions, and real English",
        "documents_seed": SEED,
    }
    params = methods.make_parameters(methods.get("sekv"), "demo", {"router": "trained"})
    path = train_sekv(
        loaded.model, loaded.tokenizer, out, steps, documents(maker, count), params, settings(batch), progress, about
    )
    if model == "demo":
        for name in (path, path.with_suffix(".json")):
            shutil.copy(name, ROUTER.with_suffix(name.suffix))
    return path


def show(figures: dict[str, Any]) -> None:
    """Print one line of progress."""
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train SeKV's router for the demo model.")
    parser.add_argument("--out", type=Path, default=Path("build/sekv-router"))
    parser.add_argument(
        "--model", default="demo", help="folder of another state of the demo model; its router is not installed"
    )
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--documents", type=int, default=300)
    arguments = parser.parse_args()
    train_router(arguments.out, arguments.steps, arguments.batch, arguments.documents, arguments.model, show)


if __name__ == "__main__":
    main()
