"""Runs behind SeKV's claims: arms on the same generated prompts, what each run showed, and when two arms count as
different."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens import methods
from kvlens.lab.claims.methods.sekv_setting import Arm, Setting, Whole
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.methods.sekv.spans import COMPRESSED
from kvlens.rows import PrefillRecord, StepRecord
from kvlens.statistics import sign_test, wilson

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine

FIRST_SEED = 7_500_000
ALL_SPANS = 4096
"""spans of which full attention is recorded, where it is: more than a prompt has"""


@dataclass
class Seen:
    """What one run showed."""

    right: bool = False
    text: str = ""
    ids: tuple[int, ...] = ()
    infeasible: float | None = None
    """the smallest budget that would have done, where the run was refused"""
    zoom: list[np.ndarray] = field(default_factory=list)
    """zoom rate [L, Hq] per step"""
    asked: list[np.ndarray] = field(default_factory=list)
    """share of spans [2, L, Hq] per step that eq. 12 has a router expand, where full attention was recorded"""
    tau: float | None = None
    """mean threshold of the heads that have one, as a probability"""
    ranks: list[np.ndarray] = field(default_factory=list)
    caps: list[np.ndarray] = field(default_factory=list)
    """largest rank each of `ranks` could have"""
    tokens: list[int] = field(default_factory=list)
    """of the spans in host memory"""
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
        self._away: np.ndarray = np.empty(0, int)

    def prefill(self, record: PrefillRecord) -> None:
        seen = self.seen
        self._tokens = {span.span: span.tok_end - span.tok_start for span in record.spans}
        self._away = np.array([span.span for span in record.spans if span.kind in COMPRESSED], int)
        ids = next((row.values.astype(int) for row in record.journal if row.name == "spans"), np.empty(0, int))
        for row in record.journal:
            if row.name in ("rank_k", "rank_v"):
                seen.ranks.append(row.values)
                seen.caps.append(np.minimum(self.max_rank, [self._tokens[s] for s in ids]))
        logits = [x for row in record.journal if row.name == "logit_tau" for x in row.values if not np.isnan(x)]
        seen.tau = float((1 / (1 + np.exp(-np.array(logits)))).mean()) if logits else None
        seen.tokens = [self._tokens[span] for span in self._away.tolist()]
        seen.stored = sum(row.cold_bytes for row in record.span_heads)
        seen.exact = sum(self._tokens[row.span] * self.head_bytes for row in record.span_heads)
        seen.raw = [row.form == "raw" for row in record.span_heads]

    def step(self, record: StepRecord) -> None:
        self._tokens |= {span.span: span.tok_end - span.tok_start for span in record.spans}
        if "zoom_rate" in record.head:
            self.seen.zoom.append(record.head["zoom_rate"])
        if record.oracle is not None:
            self.seen.asked.append(asked_share(record.oracle.span, record.oracle.full, self._away))
        zooms = [t for t in record.transfers if t.cause == "zoom" and t.span is not None]
        self.seen.moved += sum(t.bytes for t in zooms)
        self.seen.moved_exact += sum(self._tokens[t.span] * self.head_bytes for t in zooms if t.span is not None)


def asked_share(span: np.ndarray, full: np.ndarray, away: np.ndarray) -> np.ndarray:
    """Share of the spans `away` that eq. 12 has a router expand, the fewest that hold rho of a head's mass on spans:
    first at positions that training mines, where few spans hold half of the head's attention (none at others), then at
    all. span, full: ids, -1 = none, and full attention's mass [L, Hq, K] -> [2, L, Hq]."""
    import torch

    from kvlens.lab.training.sekv import losses
    from kvlens.lab.training.sekv.settings import SeKVTraining

    mass = torch.from_numpy(np.where(span[..., None] == away, full[..., None], 0.0).sum(2))
    usual = SeKVTraining()
    share = losses.coverage_set(mass, usual.rho).double().mean(-1)
    mined = losses.mined(mass, usual.concentration, usual.strongest)
    both: np.ndarray = torch.stack((share * mined, share)).numpy()
    return both


class Bench:
    """Runs arms on generated prompts, each read once for all arms."""

    def __init__(self, engine: Engine, setting: Setting, prompts: int, report: Callable[[str], None]) -> None:
        from kvlens.lab.bench.trials import Prompts

        self.engine, self.setting, self.count, self.report = engine, setting, prompts, report
        self.prompts = Prompts(engine, FIRST_SEED)
        self._bases: dict[tuple[str, int, str], Whole] = {}

    def base(self, task: str, length: int, budget: str) -> Whole:
        """The whole method, of whose parameters all arms are made: for all prompts those that fit the first one."""
        from kvlens.engine.engine import Options
        from kvlens.lab.bench.trials import NEW_TOKENS, chosen
        from kvlens.memory.budget import Budget

        key = (task, length, budget)
        if key not in self._bases:
            method, preset = methods.get("sekv"), self.setting.preset
            if preset is not None:
                params = methods.make_parameters(method, preset, {})
            else:
                row: dict[str, Any] = {"preset": "paper", "overrides": {}}
                _, prompt, _ = self.prompts(task, length, 0)
                options = Options(max_new=NEW_TOKENS[task])
                found = chosen(self.engine, prompt, method, row, Budget.parse(budget), options)
                preset, params = found.preset, found.params
            params = replace(params, **self.setting.whole)
            self._bases[key] = Whole(preset or "paper", params, self.engine.loaded.shape.head_dim)
        return self._bases[key]

    def run(self, task: str, index: int, params: SeKVParameters, budget: str | None, **options: Any) -> Seen:
        """One answer, of the length that the setting has for it. options: over the engine's."""
        from kvlens.engine.engine import Options
        from kvlens.lab.bench.trials import NEW_TOKENS
        from kvlens.memory.budget import Budget, BudgetInfeasible
        from kvlens.tasks import get

        length = options.pop("length", self.setting.length)
        asked, prompt, read = self.prompts(task, length, index)
        method, new, shape = methods.get("sekv"), NEW_TOKENS[task], self.engine.loaded.shape
        sink = Watch(params.max_rank, shape.head_token_bytes)
        limit = None if budget is None else Budget.parse(budget)
        try:
            result = self.engine.run(prompt, method, params, limit, Options(max_new=new, **options), sink, read=read)
        except BudgetInfeasible as error:
            return Seen(infeasible=error.smallest / error.full)
        sink.seen.right = bool(get(task).grade(asked, result.text) == 1)
        sink.seen.text, sink.seen.ids = result.text, tuple(result.ids)
        return sink.seen

    def arms(self, of: Mapping[str, Arm]) -> dict[str, list[Seen]]:
        """All arms on the same prompts of the setting's tasks, task after task."""
        found: dict[str, list[Seen]] = {name: [] for name in of}
        setting = self.setting
        for task in setting.tasks:
            count = self.count * setting.times
            for index in range(count):
                base = self.base(task, setting.length, setting.budget)
                for name, arm in of.items():
                    if arm.everywhere or (task == setting.tasks[0] and index < self.count):
                        budget = setting.budget if arm.limit else None
                        found[name].append(self.run(task, index, replace(base.params, **arm.switches), budget))
                self.report(f"sekv: parts, {task} {index + 1}/{count}")
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
    def floor(self) -> bool:
        """Neither answers a single prompt, so that nothing can be told."""
        return not any(seen.right for seen in (*self.a, *self.b))

    @property
    def verdict(self) -> bool | None:
        """a is better than b: True, False (it is worse), None (the prompts cannot tell)."""
        return None if sign_test(self.better, self.worse) >= 0.05 else self.better > self.worse


def exact(runs: list[Seen]) -> str:
    """'0.60 (0.39-0.78)'."""
    share = sum(seen.right for seen in runs) / len(runs)
    low, high = wilson(share, len(runs))
    return f"{share:.2f} ({low:.2f}-{high:.2f})"
