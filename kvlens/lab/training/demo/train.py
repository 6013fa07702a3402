"""Train the demo model from nothing: `python -m kvlens.lab.training.demo.train --out DIR` (the command `kvlens train
demo` calls `train_demo`).

Two processes of one thread each share the work (gloo). The schedule is counted in steps, so a busy machine makes it
slower but not shorter. A checkpoint with the optimizer's state is written every two minutes; the same command run again
continues from it.
"""

import argparse
import json
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kvlens.lab.training.demo import circuit, english, export
from kvlens.lab.training.demo.loss import loss_and_counts
from kvlens.lab.training.demo.rows import KINDS, RowMaker, make_batch
from kvlens.lab.training.demo.schedule import (
    FULL_MINUTES,
    LEARNING_RATE,
    PROCESSES,
    TOKENS_PER_PROCESS,
    Stage,
    scaled_stages,
)
from kvlens.lab.training.demo.tokenizer import Encoder, load_tokenizer, train_tokenizer

CHECKPOINT_SECONDS = 120


Progress = Callable[[dict[str, object]], None]


class Run:
    """State of one training process: model, optimizer, step, running figures; owns the checkpoint."""

    def __init__(self, out: Path, minutes: float, seed: int, rank: int) -> None:
        self.out, self.seed, self.rank = out, seed, rank
        self.stages = scaled_stages(minutes)
        self.total = sum(stage.steps for stage in self.stages)
        self.work = sum(stage.steps * stage.cost for stage in self.stages)
        self.model = circuit.build_model(len(load_tokenizer(out)), seed=seed)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.step, self.tokens, self.wall, self.cpu = 0, 0, 0.0, 0.0
        self.average = torch.zeros(3 + 2 * len(KINDS))
        path = out / "checkpoint.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.tokens, self.wall, self.cpu = state["step"], state["tokens"], state["wall"], state["cpu"]
            self.average = state["average"]

    def save(self) -> None:
        """Write the checkpoint whole or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "wall": self.wall,
            "cpu": self.cpu,
            "average": self.average,
        }
        torch.save(state, self.out / "checkpoint.tmp")
        os.replace(self.out / "checkpoint.tmp", self.out / "checkpoint.pt")

    def place(self) -> tuple[Stage, float]:
        """The stage of the current step and the share of the work done."""
        cost_done, first_step = 0.0, 0
        for stage in self.stages:
            if self.step < first_step + stage.steps:
                return stage, (cost_done + (self.step - first_step) * stage.cost) / self.work
            first_step, cost_done = first_step + stage.steps, cost_done + stage.steps * stage.cost
        return self.stages[-1], 1.0

    def advance(self, maker: RowMaker) -> None:
        """One step on all processes."""
        stage, progress = self.place()
        rng = random.Random(self.seed * 10_000_019 + self.step * PROCESSES + self.rank)
        count = max(1, TOKENS_PER_PROCESS // stage.length)
        rows, ids, position = make_batch(maker, rng, stage.length, count, stage.english, stage.copy, stage.skip)
        loss, counts = loss_and_counts(self.model, rows, ids, position)
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None] + [counts])
        if dist.is_initialized():
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
        gradient, counts = flat[: -len(counts)], flat[-len(counts) :]
        gradient.mul_((1.0 / gradient.norm()).clamp(max=1.0))
        start = 0
        for p in self.parameters:
            p.grad = gradient[start : start + p.numel()].view_as(p)
            start += p.numel()
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (self.step + 1) / 40) * max(0.02, 1.0 - progress)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        keep = torch.where(counts[:3] > 0, 0.97, 1.0)
        self.average[:3] = keep * self.average[:3] + (1 - keep) * counts[:3]
        self.average[3:] = 0.98 * self.average[3:] + counts[3:]
        self.step += 1
        self.tokens += PROCESSES * ids.numel()

    def figures(self) -> dict[str, object]:
        """What is shown as progress and logged."""
        stage, progress = self.place()
        hits, totals = self.average[3::2], self.average[4::2]
        right = {kind: round(float(h / n), 3) for kind, h, n in zip(KINDS, hits, totals, strict=True) if n > 0.05}
        losses = dict(
            zip(("answer", "template", "english"), (round(x, 3) for x in self.average[:3].tolist()), strict=True)
        )
        return {
            "step": self.step,
            "of": self.total,
            "length": stage.length,
            "progress": round(progress, 4),
            "tokens": self.tokens,
            "wall_s": round(self.wall),
            "cpu_s": round(self.cpu),
            "loss": losses,
            "right": right,
        }


def _work(rank: int, out: Path, minutes: float, seed: int, port: int, progress: Progress | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    run = Run(out, minutes, seed, rank)
    maker = RowMaker(Encoder(load_tokenizer(out)), english.split(english.collect())[0])
    wall, cpu, shown, saved = time.time(), time.process_time(), time.time(), time.time()
    while run.step < run.total:
        run.advance(maker)
        now, used = time.time(), time.process_time()
        run.wall, run.cpu, wall, cpu = run.wall + now - wall, run.cpu + PROCESSES * (used - cpu), now, used
        last = run.step == run.total
        if rank == 0 and (now - shown > 10 or last):
            shown, figures = now, run.figures()
            with (out / "log.jsonl").open("a") as log:
                log.write(json.dumps(figures) + "\n")
            if progress:
                progress(figures)
        if rank == 0 and (now - saved > CHECKPOINT_SECONDS or last):
            run.save()
            saved = now
    dist.destroy_process_group()


def show(figures: dict[str, object]) -> None:
    """Print one line of progress."""
    print(json.dumps(figures), flush=True)


def train_demo(
    out: Path, minutes: float = FULL_MINUTES, seed: int = 0, resume: bool = True, progress: Progress | None = show
) -> Path:
    """Train into the folder `out` (tokenizer, checkpoint, log) and export the model to `out`/model; returns that
    folder.

    `minutes` is the nominal duration on two idle cores and scales the number of steps; `progress` must be picklable.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not resume:
        (out / "checkpoint.pt").unlink(missing_ok=True)
    if not (out / "tokenizer.json").exists():
        train_tokenizer(english.split(english.collect())[0], seed).save_pretrained(str(out))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_work, args=(out, minutes, seed, port, progress), nprocs=PROCESSES)
    return export.export(out, out / "model", minutes, seed)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the kvlens demo model from scratch on two CPU cores.")
    parser.add_argument("--out", type=Path, default=Path("build/demo-model"))
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="do not continue from a checkpoint")
    arguments = parser.parse_args()
    print(train_demo(arguments.out, arguments.minutes, arguments.seed, not arguments.fresh))


if __name__ == "__main__":
    main()
