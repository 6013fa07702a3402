"""Runs behind SeKV's claims: arms on the same generated prompts, what each run showed, and when two arms count as
different."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens import methods
from kvlens.bench.intervals import sign_test, wilson
from kvlens.rows import PrefillRecord, StepRecord

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine

FIRST_SEED = 7_500_000
TASKS = ("needle", "multikey")
LENGTH, BUDGET = 1024, "50%"
"""of the arms: at smaller budgets hardly any arm answers, and no difference can be seen"""


@dataclass
class Seen:
    """What one run showed."""

    right: bool = False
    zoom: list[np.ndarray] = field(default_factory=list)
    """zoom rate [L, Hq] per step"""
    ranks: list[np.ndarray] = field(default_factory=list)
    caps: list[np.ndarray] = field(default_factory=list)
    """largest rank each of `ranks` could have"""
    stored: int = 0
    exact: int = 0
    """bytes of all spans as they lie in host memory, and of their exact keys and values"""
    raw: list[bool] = field(default_factory=list)
    moved: int = 0
    moved_exact: int = 0


class Watch:
    """A sink that fills a Seen. max_rank: R_max; head_bytes: of one exact token of one KV head."""

    def __init__(self, max_rank: int, head_bytes: int) -> None:
        self.seen, self.max_rank, self.head_bytes = Seen(), max_rank, head_bytes
        self._tokens: dict[int, int] = {}

    def prefill(self, record: PrefillRecord) -> None:
        seen = self.seen
        self._tokens = {span.span: span.tok_end - span.tok_start for span in record.spans}
        ids = next((row.values.astype(int) for row in record.journal if row.name == "spans"), np.empty(0, int))
        for row in record.journal:
            if row.name in ("rank_k", "rank_v"):
                seen.ranks.append(row.values)
                seen.caps.append(np.minimum(self.max_rank, [self._tokens[s] for s in ids]))
        seen.stored = sum(row.cold_bytes for row in record.span_heads)
        seen.exact = sum(self._tokens[row.span] * self.head_bytes for row in record.span_heads)
        seen.raw = [row.form == "raw" for row in record.span_heads]

    def step(self, record: StepRecord) -> None:
        self._tokens |= {span.span: span.tok_end - span.tok_start for span in record.spans}
        if "zoom_rate" in record.head:
            self.seen.zoom.append(record.head["zoom_rate"])
        zooms = [t for t in record.transfers if t.cause == "zoom" and t.span is not None]
        self.seen.moved += sum(t.bytes for t in zooms)
        self.seen.moved_exact += sum(self._tokens[t.span] * self.head_bytes for t in zooms if t.span is not None)


class Bench:
    """Runs arms on generated prompts, each read once for all arms."""

    def __init__(self, engine: Engine, prompts: int, report: Callable[[str], None]) -> None:
        from kvlens.bench.trials import Prompts

        self.engine, self.count, self.report = engine, prompts, report
        self.prompts = Prompts(engine, FIRST_SEED)

    def run(self, task: str, length: int, index: int, switches: dict[str, Any], budget: str | None) -> Seen:
        """One answer."""
        from kvlens.bench.trials import NEW_TOKENS
        from kvlens.demo.tasks import score
        from kvlens.engine.engine import Options
        from kvlens.memory.budget import Budget

        source, prompt, read = self.prompts(task, length, index)
        method, new, shape = methods.get("sekv"), NEW_TOKENS[task], self.engine.loaded.shape
        params = methods.make_parameters(method, "demo", switches)
        sink = Watch(params.max_rank, shape.head_token_bytes)
        limit = None if budget is None else Budget.parse(budget)
        result = self.engine.run(prompt, method, params, limit, Options(max_new=new), sink, read=read)
        sink.seen.right = bool(score(task, source.answer, result.text) == 1)
        return sink.seen

    def arms(self, switches: dict[str, dict[str, Any]]) -> dict[str, list[Seen]]:
        """All arms on the same prompts of both tasks."""
        found: dict[str, list[Seen]] = {name: [] for name in switches}
        for task in TASKS:
            for index in range(self.count):
                for name, values in switches.items():
                    found[name].append(self.run(task, LENGTH, index, values, BUDGET))
                self.report(f"sekv: parts, {task} {index + 1}/{self.count}")
        return found


@dataclass(frozen=True)
class Pair:
    """Arm a against arm b on the same prompts."""

    a: list[Seen]
    b: list[Seen]

    @property
    def better(self) -> int:
        return sum(x.right and not y.right for x, y in zip(self.a, self.b, strict=True))

    @property
    def worse(self) -> int:
        return sum(y.right and not x.right for x, y in zip(self.a, self.b, strict=True))

    @property
    def verdict(self) -> bool | None:
        """a is better than b: True, False (it is worse), None (the prompts cannot tell)."""
        return None if sign_test(self.better, self.worse) >= 0.05 else self.better > self.worse


def exact(runs: list[Seen]) -> str:
    """'0.60 (0.39-0.78)'."""
    share = sum(seen.right for seen in runs) / len(runs)
    low, high = wilson(share, len(runs))
    return f"{share:.2f} ({low:.2f}-{high:.2f})"
