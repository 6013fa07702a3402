"""The runs behind SentKVCompress's claims: the paper's parameters, its ablations and FullKV on the same prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlens import tasks
from kvlens.engine.engine import Engine, Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.bench.rates import reused
from kvlens.lab.bench.trials import Prompts
from kvlens.lab.claims.methods.sentkv_cases import Case
from kvlens.methods import get, make_parameters
from kvlens.rows import PrefillRecord, StepRecord
from kvlens.tasks import Asked
from kvlens.text.prompts import Prompt

FULL = "full"


@dataclass
class Seen:
    """One answer of one arm. A sink."""

    right: float = 0.0
    """share of its tokens that were the most likely ones, or the task's score; 1: the answer is right"""
    task: str = ""
    reused: list[float] = field(default_factory=list)
    """share of wanted tokens that were reused, per (step after the first, layer, KV head)"""
    reusable: list[float] = field(default_factory=list)
    similarity: list[float] = field(default_factory=list)
    """cosine of the queries with those of the step before, mean over the KV head's group"""
    moved: float = 0.0
    """bytes to the device after the first step"""
    ideal: float = 0.0
    extremes: tuple[float, float] = (0.0, 0.0)
    """bytes of minima and maxima, bytes of the KV they stand for"""

    def prefill(self, record: PrefillRecord) -> None:
        noted = {row.name: row.values for row in record.journal}.get("preselection_bytes")
        if noted is not None:
            self.extremes = float(noted[0]), float(noted[1])

    def step(self, record: StepRecord) -> None:
        kv = record.kv
        here, wanted = reused(record)
        if record.step == 0 or not wanted.any():
            return
        per_token = kv["h2d_bytes"].sum() / max(1.0, kv["recalled_tokens"].sum())
        queries = record.head["qcos"]
        self.similarity += queries.reshape(*wanted.shape, -1).mean(-1).ravel().tolist()
        self.reused += (here / wanted).ravel().tolist()
        if per_token:
            self.reusable += (1 - kv["ideal_bytes"] / per_token / wanted).ravel().tolist()
        else:
            self.reusable += [1.0] * wanted.size
        self.moved += kv["h2d_bytes"].sum()
        self.ideal += kv["ideal_bytes"].sum()


def measure(engine: Engine, case: Case, prompts: int, report: Callable[[str], None]) -> dict[str, list[Seen]]:
    """Arm -> one answer per prompt, `prompts` of each task, in the same order; an arm of causes on its tasks alone."""
    made = Prompts(engine, case.first_seed)
    seen: dict[str, list[Seen]] = {}
    for index in range(prompts):
        for task in case.tasks:
            source, prompt, read = made(task, case.length, index)
            for name, changes in {FULL: None, **case.arms(task)}.items():
                seen.setdefault(name, []).append(_answer(engine, case, source, prompt, read, changes))
        report(f"sentkv: {index + 1} of {prompts} prompts of each task")
    return seen


def _answer(
    engine: Engine, case: Case, source: Asked, prompt: Prompt, read: ReadPrompt, changes: dict[str, Any] | None
) -> Seen:
    """changes None: FullKV."""
    method = get(FULL if changes is None else "sentkv")
    params = make_parameters(method, None if changes is None else "paper", changes or {})
    seen, task = Seen(task=source.task), tasks.get(source.task)
    if not case.feeds_key:
        result = engine.run(prompt, method, params, None, Options(max_new=task.new_tokens), seen, read=read)
        seen.right = task.grade(source, result.text)
        return seen
    key = tuple(engine.loaded.tokenizer.encode(source.answer, add_special_tokens=False))
    result = engine.run(prompt, method, params, None, Options(forced=key), seen, keep_logits=True, read=read)
    seen.right = float(
        np.mean([int(logits.argmax()) == token for logits, token in zip(result.logits, key, strict=True)])
    )
    return seen
