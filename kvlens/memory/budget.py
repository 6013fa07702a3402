"""The budget a person asks for, and the refusal when a method cannot keep to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvlens.shape import KVShape

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Budget:
    """Peak device-resident KV bytes inside a step that a run may use, as asked: a share of full KV, tokens, or
    bytes."""

    amount: float
    unit: str
    """share | tok | bytes"""
    text: str

    @classmethod
    def parse(cls, text: str) -> Budget:
        """'0.1' or '10%' of full KV, '512tok', '64MB' (10^6 bytes; MiB for 2^20). Raises ValueError with one
        sentence."""
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z%]*)\s*", text)
        unit = match.group(2).lower() if match else ""
        amount = float(match.group(1)) if match else 0.0
        if match and amount > 0:
            if unit == "":
                return cls(amount, "share", text.strip())
            if unit == "%":
                return cls(amount / 100, "share", text.strip())
            if unit in ("tok", "tokens"):
                return cls(amount, "tok", text.strip())
            if unit in _UNITS:
                return cls(amount * _UNITS[unit], "bytes", text.strip())
        raise ValueError(
            f"budget '{text}' is not understood: give a share of full KV (0.1 or 10%), tokens (512tok) or bytes (64MB)."
        )

    def bytes(self, shape: KVShape, tokens: int) -> int | None:
        """Bytes for a sequence of `tokens` tokens in all (prompt and generated); None = no limit (a share of 1 or
        more)."""
        if self.unit == "share":
            return None if self.amount >= 1 else int(self.amount * shape.full_kv_bytes(tokens))
        return int(self.amount * (shape.token_bytes if self.unit == "tok" else 1))


class BudgetInfeasible(ValueError):
    """A method cannot run inside the budget it was given. Nothing is clipped in silence: the run stops before
    decoding."""

    def __init__(
        self,
        method: str,
        budget: int,
        smallest: int,
        full: int,
        instead: str = "",
        would_do: Mapping[str, str] | None = None,
    ) -> None:
        """`smallest`: feasible bytes. instead: what to do, where more is known than that; would_do: the same as options
        of `kvlens run` and their values, {} where no option alone would do."""
        self.budget, self.smallest, self.full = budget, smallest, full
        raised = percent_up(smallest / full)
        advice = instead or f"raise --budget to {raised} or change the method's parameters"
        self.would_do = dict(would_do if would_do is not None else {} if instead else {"budget": raised})
        super().__init__(
            f"budget_infeasible: {method} needs at least {smallest:,} bytes on the device for this prompt "
            f"({smallest / full:.1%} of full KV), the budget is {budget:,} bytes ({budget / full:.1%}); {advice}."
        )


def percent_up(share: float) -> str:
    """A share as --budget takes it, rounded up to a thousandth."""
    return f"{-(-share * 1000 // 1) / 1000:.3f}"
