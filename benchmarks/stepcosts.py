"""What placing, steps and recording cost in CPU time as the number of tokens grows, as ratios inside one process.

All arms of a length take turns, round by round. A ratio is of one round; the table has its median. `heads` is a random
model with the heads of an 8B model (32 layers, 32 query and 8 KV heads), whose prompt's keys, values and queries are
drawn; of other models the prompt is read once per length.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvlens import methods, tasks
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.engine.engine import Engine, Options
from kvlens.engine.hf_attention import ATTENTION
from kvlens.engine.models import LoadedModel, load
from kvlens.engine.objects import adopt
from kvlens.engine.prefill import ReadPrompt, Surprisals
from kvlens.lab.bench.trialprompts import Trial
from kvlens.lab.bench.trials import chosen, header
from kvlens.meta import RunMeta
from kvlens.methods.run_inputs import Peeked
from kvlens.store.writer import TraceWriter
from kvlens.tasks.encoding import encoding_of
from kvlens.text.prompts import Prompt, tokenize

HEADS = "heads"
SIZES = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
QUERIES, SEED, FIRST = 128, 8_500_000, 8
"""queries that are drawn; seed of the prompt; steps of the run that is taken off"""
TASK, BUDGET = "niah_single", "20%"


@dataclass(frozen=True)
class Arm:
    """A method, and how it is recorded: '' (not), 'spans' or 'coverage'."""

    method: str
    recorded: str = ""

    @property
    def name(self) -> str:
        return f"{self.method}, {self.recorded}" if self.recorded else self.method


class Clock:
    """Process and wall seconds of each part of a run, by the phases that it reports."""

    def __init__(self) -> None:
        self.marks: dict[str, tuple[float, float]] = {}

    def __call__(self, phase: str, count: int, total: int) -> None:
        if count == 0:
            self.marks[phase] = time.process_time(), time.perf_counter()

    def seconds(self) -> dict[str, tuple[float, float]]:
        """Return (CPU, wall) of placing and of decoding, until now."""
        ends = {"place": self.marks["decode"], "decode": (time.process_time(), time.perf_counter())}
        return {name: (cpu - self.marks[name][0], wall - self.marks[name][1]) for name, (cpu, wall) in ends.items()}


class Costs:
    """One model, whose prompts of several lengths the arms run."""

    def __init__(self, model: str, steps: int) -> None:
        self.loaded = random_model() if model == HEADS else load(model)
        self.drawn, self.steps, self.engine = model == HEADS, steps, Engine(self.loaded)

    def read(self, tokens: int) -> tuple[Prompt, ReadPrompt]:
        """Return a prompt of about so many tokens, read."""
        tokenizer = self.loaded.tokenizer
        task_prompt = tasks.ask(tasks.get(TASK), tokens, 0.5, SEED, encoding_of(tokenizer))
        prompt = tokenize(tasks.prompt_of(task_prompt), tokenizer, self.loaded.max_positions, FIRST + self.steps)
        if self.drawn:
            return prompt, draw(self.loaded, prompt)
        return prompt, self.engine.read(prompt, queries=QUERIES, received=True)

    def run(self, arm: Arm, prompt: Prompt, read: ReadPrompt) -> dict[str, tuple[float, float]]:
        """Return (CPU, wall) seconds of placing and of a step, and as `beside` what FIRST steps take more than so many
        steps: a recorded run writes the rows of its prompt beside them. A step's seconds are those of a run of FIRST +
        steps less those of a run of FIRST, by step. Raises BudgetInfeasible or ValueError."""
        short, long = (self.run_steps(arm, prompt, read, steps) for steps in (FIRST, FIRST + self.steps))
        step = tuple((b - a) / self.steps for a, b in zip(short["decode"], long["decode"], strict=True))
        beside = tuple(max(0.0, a - FIRST * each) for a, each in zip(short["decode"], step, strict=True))
        place = min(short["place"], long["place"])
        return {"place": place, "step": (step[0], step[1]), "beside": (beside[0], beside[1])}

    def run_steps(self, arm: Arm, prompt: Prompt, read: ReadPrompt, steps: int) -> dict[str, tuple[float, float]]:
        """Return (CPU, wall) seconds of placing and of decoding so many steps. Raises BudgetInfeasible or
        ValueError."""
        method = methods.get(arm.method)
        row = header(Trial(TASK, len(prompt.ids), 0.5, SEED, 0, arm.method, BUDGET), self.loaded.name)
        limited = arm.method != methods.REFERENCE and row["rule"] == "resident bytes"
        limit = Budget.parse(BUDGET) if limited else None
        coverage = arm.recorded == "coverage"
        options = Options(max_new=steps, ignore_eos=True, coverage=coverage)
        if not coverage:
            options = Options(max_new=steps, ignore_eos=True, coverage=False, oracle="off")
        params = methods.make_parameters(method, None, {})
        if arm.method != methods.REFERENCE:
            params = chosen(self.engine, prompt, method, row, limit, options).params
        clock = Clock()
        if not arm.recorded:
            self.engine.run(prompt, method, params, limit, options, None, clock, read=read)
            seconds = clock.seconds()
        else:
            shape = self.loaded.shape
            with tempfile.TemporaryDirectory() as folder:
                writer = TraceWriter(Path(folder))
                writer.begin(RunMeta(layers=shape.layers, q_heads=shape.q_heads, kv_heads=shape.kv_heads))
                result = self.engine.run(prompt, method, params, limit, options, writer, clock, read=read)
                seconds = clock.seconds()
                writer.finish("completed", None, result.checks, {})
        return seconds


def random_model() -> LoadedModel:
    """Return a decoder with an 8B model's heads and narrow layers, with drawn weights and SmolLM2's tokenizer."""
    torch.manual_seed(0)
    tokenizer = load("smollm2").tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=2048,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        **SIZES,
    )
    model: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    loaded = adopt(model, tokenizer, HEADS)
    model.set_attn_implementation(ATTENTION)
    return loaded


def draw(loaded: LoadedModel, prompt: Prompt) -> ReadPrompt:
    """Return what a model with these sizes might have read: independent normal keys, values and queries."""
    shape, n, generator = loaded.shape, len(prompt.ids) - 1, torch.Generator().manual_seed(1)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(shape.layers, heads, tokens, shape.head_dim, generator=generator)

    received = torch.rand(shape.layers, shape.q_heads, n, generator=generator)
    peeked = Peeked(normal(shape.q_heads, 1), normal(shape.kv_heads, 1), normal(shape.kv_heads, 1))
    surprisal = Surprisals.wrap(torch.rand(n + 1, generator=generator) * 5)
    keys, values = normal(shape.kv_heads, n), normal(shape.kv_heads, n)
    return ReadPrompt(prompt.ids, keys, values, normal(shape.q_heads, QUERIES), peeked, surprisal, received)


def measure(model: str, lengths: Sequence[int], arms: Sequence[Arm], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Return a row per length and arm: seconds of placing, of a step and `beside` the first steps (CPU and wall,
    medians of the rounds) and, as `ratio`, a step's CPU and wall against full KV's, and a recorded arm's against the
    same method's."""
    torch.set_num_threads(1)
    costs, rows = Costs(model, steps), []
    for tokens in lengths:
        prompt, read = costs.read(tokens)
        seconds_of: dict[Arm, list[dict[str, tuple[float, float]]]] = {arm: [] for arm in arms}
        refused: dict[Arm, str] = {}
        for turn in range(rounds + 1):
            for arm in arms:
                if arm in refused:
                    continue
                try:
                    seconds = costs.run(arm, prompt, read)
                except (BudgetInfeasible, ValueError) as error:
                    refused[arm] = type(error).__name__
                    continue
                if turn:  # the first turn warms up
                    seconds_of[arm].append(seconds)
        rows += [row_of(model, len(prompt.ids), arm, seconds_of, refused.get(arm)) for arm in arms]
        del prompt, read
    return rows


def row_of(
    model: str, tokens: int, arm: Arm, seconds_of: dict[Arm, list[dict[str, tuple[float, float]]]], refused: str | None
) -> dict[str, Any]:
    """Return an arm's medians; `refused` alone where it did not run."""
    row: dict[str, Any] = {"model": model, "tokens": tokens, "arm": arm.name, "method": arm.method}
    if refused is not None:
        return row | {"refused": refused}
    row |= {"recorded": arm.recorded, "rounds": len(seconds_of[arm])}
    base = Arm(arm.method) if arm.recorded else Arm(methods.REFERENCE)
    for place, clock in enumerate(("cpu", "wall")):
        for part in ("place", "step", "beside"):
            row[f"{part}_{clock}_s"] = round(median(each[part][place] for each in seconds_of[arm]), 5)
        ratios = [
            a["step"][place] / b["step"][place] for a, b in zip(seconds_of[arm], seconds_of.get(base, ()), strict=False)
        ]
        if ratios:
            row[f"ratio_{clock}"] = [round(figure, 3) for figure in (median(ratios), min(ratios), max(ratios))]
    return row


def exponents(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return per model and arm the growth of placing's and a step's CPU time over the tokens: the least-squares slope
    of logarithms over all lengths that ran."""
    growth = []
    for model, arm in dict.fromkeys((row["model"], row["arm"]) for row in rows):
        ran = [row for row in rows if (row["model"], row["arm"]) == (model, arm) and "refused" not in row]
        if len(ran) < 2:
            continue
        figures = {"from": min(row["tokens"] for row in ran), "to": max(row["tokens"] for row in ran)}
        x = [math.log(row["tokens"]) for row in ran]
        for part in ("place", "step"):
            y = [math.log(max(row[f"{part}_cpu_s"], 1e-6)) for row in ran]
            middle = sum(x) / len(x)
            spread = sum((each - middle) ** 2 for each in x)
            figures[part] = round(sum((a - middle) * b for a, b in zip(x, y, strict=True)) / spread, 2)
        growth.append({"model": model, "arm": arm} | figures)
    return growth
