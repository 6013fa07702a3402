"""CHESS on the right answer, forced token by token: how it fares, and where the pages with the asked facts stand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvlens.demo.tasks import TaskPrompt, make_prompt
from kvlens.engine.engine import Engine, Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.methods.chess.method import UNCERTAIN, Chess
from kvlens.text.prompts import Prompt, PromptText, tokenize

LENGTH = 2048
FIRST_SEED = 6_500_000
NEW = 128
Notes = list[tuple[str, torch.Tensor]]
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Point:
    """One answer, forced token by token. The method goes its own way on it, so `right` = 1 exactly where it would have
    given it."""

    nats: float
    """surprisal of the right answer, mean per token"""
    right: float
    """share of its tokens that were the most likely ones"""
    rebuilt: int
    """reconstructions while decoding"""
    uncertain: int
    """of them because a page was uncertain"""
    judged: int
    """pages all of whose tokens were generated"""


@dataclass(frozen=True)
class Case:
    source: TaskPrompt
    prompt: Prompt
    read: ReadPrompt
    answer: tuple[int, ...]


def make_case(engine: Engine, task: str, size: int, index: int) -> Case:
    """Prompt `index` of a task, read once, and its right answer in tokens."""
    tokenizer = engine.loaded.tokenizer
    encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    source = make_prompt(task, LENGTH, (index % 5) / 4, FIRST_SEED + index, encode, items=size, hops=size)
    prompt = tokenize(PromptText(source.text), tokenizer, engine.loaded.max_positions, NEW)
    return Case(source, prompt, engine.read(prompt), tuple(encode(source.answer)))


def watching(notes: Notes) -> type[Chess]:
    """CHESS whose journal is kept without a recorder."""

    class Watch(Chess):
        def note(self, name: str, values: torch.Tensor, layer: int | None = None, kv_head: int | None = None) -> None:
            notes.append((name, values))

    return Watch


def forced(
    engine: Engine, case: Case, method: Any, params: Any, notes: Notes | None = None
) -> tuple[Point, dict[str, torch.Tensor]]:
    """The right answer fed to the method -> how it fared, and its first selection."""
    result = engine.run(
        case.prompt, method, params, options=Options(forced=case.answer), keep_logits=True, read=case.read
    )
    right = np.mean([int(logits.argmax()) == token for logits, token in zip(result.logits, case.answer, strict=True)])
    first: dict[str, torch.Tensor] = {}
    for name, values in notes or []:
        first.setdefault(name, values)
    return Point(-float(np.mean(result.logprobs)), float(right), **_counts(notes or [])), first


def _counts(notes: Notes) -> dict[str, int]:
    reasons = [float(values) for name, values in notes if name == "reconstructed"]
    judged = [not math.isnan(float(values)) for name, values in notes if name == "page_entropy_nats"]
    return {
        "rebuilt": sum(reason > 0 for reason in reasons),
        "uncertain": reasons.count(UNCERTAIN),
        "judged": sum(judged),
    }


def needed(case: Case, first: dict[str, torch.Tensor], page: int = 8) -> list[dict[str, float]]:
    """How the pages with the asked facts stand at the first selection: mean rank among the candidates (0 best, 1 last,
    0.5 by chance), the share of them that the hierarchy kept, the share that as many best pages without it would have
    kept, and chance. [] when the facts lie in pages that are attended anyway."""
    tokens = [
        i
        for i, at in enumerate(case.prompt.offsets)
        if at and any(at[0] < stop and at[1] > a for a, stop in case.source.needle)
    ]
    score = first["page_score"].double().numpy()
    candidates = np.flatnonzero(~np.isnan(score))
    asked = [j for j in sorted({token // page for token in tokens}) if j in candidates]
    if not asked:
        return []
    order = candidates[np.argsort(-score[candidates], kind="stable")].tolist()
    kept = set(np.flatnonzero(first["page_kept"].numpy()).tolist())
    best = set(order[: len(kept)])
    rank = float(np.mean([order.index(j) for j in asked])) / max(1, len(order) - 1)
    share, flat = (len(pages.intersection(asked)) / len(asked) for pages in (kept, best))
    return [{"rank": rank, "kept": share, "flat": flat, "chance": len(kept) / len(order)}]


def interval(values: Sequence[float]) -> Interval:
    """(mean, low, high): 95 % by the normal approximation."""
    mean = float(np.mean(values))
    half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return mean, mean - half, mean + half
