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
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from kvlens.lab.training.demo import circuit, english, export
from kvlens.lab.training.demo.rows import KINDS, Row, RowMaker, make_batch
from kvlens.lab.training.demo.schedule import (
    FULL_MINUTES,
    LEARNING_RATE,
    PROCESSES,
    TOKENS_PER_PROCESS,
    Stage,
    scaled_stages,
)
from kvlens.lab.training.demo.tokenizer import Encoder, load_tokenizer, train_tokenizer

TEXT_WEIGHT, COPY_WEIGHT = 0.4, 0.5
CHECKPOINT_SECONDS = 120


Progress = Callable[[dict[str, object]], None]


def rope(position: torch.Tensor, head: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables [rows, 1, length, head] for explicit position ids."""
    turn = 1.0 / (theta ** (torch.arange(0, head, 2).float() / head))
    angle = position[..., None].float() * turn
    angle = torch.cat((angle, angle), -1)[:, None]
    return angle.cos(), angle.sin()


def _rotate(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def hidden_states(model: LlamaForCausalLM, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The stock forward pass without mask tensors; with gaps in position_ids transformers would see packed
    sequences."""
    config = model.config
    rows, length = ids.shape
    size, eps = (config.hidden_size,), config.rms_norm_eps

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(rows, length, count, circuit.HEAD_SIZE).transpose(1, 2)

    x = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        attention = layer.self_attn
        h = F.rms_norm(x, size, layer.input_layernorm.weight, eps)
        q = heads(attention.q_proj(h), circuit.QUERY_HEADS)
        k = heads(attention.k_proj(h), circuit.KV_HEADS)
        v = heads(attention.v_proj(h), circuit.KV_HEADS)
        q, k = q * cos + _rotate(q) * sin, k * cos + _rotate(k) * sin
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attention.o_proj(o.transpose(1, 2).reshape(rows, length, -1))
        x = x + layer.mlp(F.rms_norm(x, size, layer.post_attention_layernorm.weight, eps))
    return F.rms_norm(x, size, model.model.norm.weight, eps)


def loss_and_counts(
    model: LlamaForCausalLM, rows: list[Row], ids: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss; counts [answer loss, template loss, English loss, then answers right and asked per kind]."""
    answer, text, real = (torch.zeros(ids.shape) for _ in range(3))
    copy = KINDS.index("copy")
    for index, row in enumerate(rows):
        if row.real:
            real[index] = 1.0
        elif row.answers[:1] and row.answers[0][2] == copy:
            answer[index, row.answers[0][0] : row.answers[0][1]] = COPY_WEIGHT
        else:
            text[index] = (ids[index] != 0).float()
            for start, end, _ in row.answers:
                answer[index, start:end], text[index, start:end] = 1.0, 0.0
    cos, sin = rope(position, circuit.HEAD_SIZE, circuit.THETA)
    logits = F.linear(hidden_states(model, ids, cos, sin)[:, :-1], model.model.embed_tokens.weight)
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(rows), -1)
    parts = [(loss * weight[:, 1:]).sum() / weight[:, 1:].sum().clamp(min=1) for weight in (answer, text, real)]
    plain = (loss * (text + 2 * real)[:, 1:]).sum() / (text + 2 * real)[:, 1:].sum().clamp(min=1)
    counts = torch.zeros(3 + 2 * len(KINDS))
    counts[:3] = torch.stack(parts).detach()
    with torch.no_grad():
        right = logits.argmax(-1) == ids[:, 1:]
        for index, row in enumerate(rows):
            for start, end, kind in row.answers:
                counts[3 + 2 * kind] += right[index, start - 1 : end - 1].all()
                counts[4 + 2 * kind] += 1
    return parts[0] + TEXT_WEIGHT * plain, counts


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
