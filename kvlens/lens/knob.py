"""Another budget for the same prompt: which shares a run's method may be asked for. Arithmetic alone, no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvlens import methods
from kvlens.memory.budget import Budget
from kvlens.meta import RunMeta
from kvlens.methods.fitting import Sizes, choose, refusal
from kvlens.runs.request import default_preset
from kvlens.shape import KVShape

SHARES = (5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100)
"""percent that are offered, where the method can keep to them"""
KEPT = "keep"
"""parameter of methods that keep every token on the device: the share of tokens that is attended"""


@dataclass(frozen=True)
class Knob:
    """What is asked for otherwise, and which shares of it there are."""

    name: str
    """budget, or the method's parameter that stands for it"""
    own: float
    """percent, of the run"""
    shares: tuple[float, ...]
    """percent, ascending, the run's own among them"""

    def value(self, share: float) -> str:
        """As a command takes it."""
        return f"{share:g}%" if self.name == "budget" else f"{share / 100:g}"

    def share(self, value: str) -> float | None:
        """The percent that a command's value is; None where it is no share that is offered."""
        try:
            amount = Budget.parse(value)
        except ValueError:
            return None
        found = round(100 * amount.amount, 1) if amount.unit == "share" else None
        return found if found in self.shares else None


def knob_of(meta: RunMeta) -> Knob | None:
    """None for a method that has no such choice, is not installed here, or an old run that does not say what it was."""
    full, token = meta.full_kv_bytes, meta.token_bytes
    if not (full and token and meta.head_dim and meta.max_new and meta.config):
        return None
    try:
        method = methods.get(str(meta.method))
    except ValueError:
        return None
    if method.keeps_all:
        kept = meta.config.get(KEPT)
        known = any(field.name == KEPT for field in dataclasses.fields(method.Parameters))
        if not known or not isinstance(kept, (int, float)):
            return None
        return _knob(KEPT, 100 * float(kept), SHARES)
    asked = meta.request or {}
    preset, overrides = asked.get("preset", meta.preset), dict(asked.get("overrides", meta.config) or {})
    numbers = 2 * meta.layers * meta.kv_heads * meta.head_dim
    shape = KVShape(meta.layers, meta.q_heads, meta.kv_heads, meta.head_dim, token // numbers)
    sizes = Sizes(shape, full // token - 1 - meta.max_new, meta.max_new, None)
    usual = default_preset(method.name, str(meta.model))

    def possible(share: int) -> bool:
        at = dataclasses.replace(sizes, budget_bytes=None if share >= 100 else full * share // 100)
        try:
            run = choose(method, preset, usual, overrides, at)
        except ValueError:
            return False
        return refusal(method, preset, run, overrides, at) is None

    own = 100.0 if meta.budget_bytes is None else 100 * meta.budget_bytes / full
    return _knob("budget", own, [share for share in SHARES if possible(share)])


def _knob(name: str, own: float, shares: Any) -> Knob:
    mine = round(min(100.0, own), 1)
    return Knob(name, mine, tuple(sorted({mine, *(float(share) for share in shares)})))
