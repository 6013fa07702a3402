"""The budget a person requests, the account of the bytes a run keeps on the device, and the refusal when a method does
not fit its budget."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from kvlens.shape import KVShape
from kvlens.text.units import si_bytes

if TYPE_CHECKING:
    import torch


_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
WHOLE = "100%"
"""the budget that is no limit, as it is asked for"""
NO_LIMIT = "no limit"
"""what pages, tables and reports call a budget of all of full KV, and none at all"""


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
        """'0.1' or '10%' of full KV, all of it at most; '512tok'; '64MB' (10^6 bytes; MiB for 2^20). Raises ValueError
        with one sentence."""
        match = re.fullmatch(r"\s*(-?[0-9]*\.?[0-9]+)\s*([a-zA-Z%]*)\s*", text)
        unit = match.group(2).lower() if match else ""
        if match is None or unit not in ("", "%", "tok", "tokens", *_UNITS):
            raise ValueError(
                f"budget '{text}' is not understood: give a share of full KV (0.1 or 10%), tokens (512tok) or bytes "
                "(64MB)."
            )
        amount = float(match.group(1))
        if amount <= 0:
            raise ValueError(f"budget '{text}' gives no room: it must be above 0.")
        if unit in ("", "%"):
            share = amount / 100 if unit else amount
            if share > 1:
                raise ValueError(_beyond_full(text.strip(), match.group(1), unit))
            return cls(share, "share", text.strip())
        return cls(amount * _UNITS.get(unit, 1), "bytes" if unit in _UNITS else "tok", text.strip())

    def bytes(self, shape: KVShape, tokens: int) -> int | None:
        """Bytes for a sequence of `tokens` tokens in all (prompt and generated); None = no limit (a share of 1)."""
        if self.unit == "share":
            return None if self.amount >= 1 else int(self.amount * shape.full_kv_bytes(tokens))
        return int(self.amount * (shape.token_bytes if self.unit == "tok" else 1))


def distinct_budgets(texts: Iterable[str], earlier: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the budgets that equal no earlier one, each once, as it is written first: '20%' and '0.2' are one budget.
    Raises ValueError as `Budget.parse`."""
    amounts = {_amount(text) for text in earlier}
    distinct: dict[tuple[str, str], str] = {}
    for text in texts:
        distinct.setdefault(_amount(text), text)
    return tuple(text for amount, text in distinct.items() if amount not in amounts)


def _amount(text: str) -> tuple[str, str]:
    """Return the unit and the amount of a budget, without the rounding of a percentage."""
    budget = Budget.parse(text)
    return budget.unit, f"{budget.amount:.12g}"


def _beyond_full(text: str, number: str, unit: str) -> str:
    """What is said of a share above full KV, whose number may be meant otherwise."""
    if unit:
        return f"budget '{text}' is more than full KV: {WHOLE} is {NO_LIMIT}, give that or less."
    share = f"{number}% for a share of it, " if float(number) <= 100 else ""
    return f"budget '{text}' is {number} times full KV: write {share}{number}tok for tokens or {number}MB for bytes."


@lru_cache(maxsize=1024)
def in_words(limit_text: str | None) -> str:
    """A budget as pages and tables call it: '20%' of '0.2', '64MB' as it was written, '9,080,832 B' of '9080832B',
    NO_LIMIT of '1.0' and None."""
    if limit_text is None:
        return NO_LIMIT
    try:
        budget = Budget.parse(limit_text)
    except ValueError:
        return limit_text
    if budget.unit != "share":
        return f"{int(budget.amount):,} B" if re.fullmatch(r"\S*[0-9]\s*[bB]", budget.text) else budget.text
    return NO_LIMIT if budget.amount >= 1 else f"{100 * budget.amount:g}%"


def of_run(limit_text: str | None, limit: int | None) -> str:
    """The same of a stored run, by the bytes that its budget came to: a share above full KV, which is refused now, was
    no limit."""
    return NO_LIMIT if limit is None else si_bytes(limit) if limit_text is None else in_words(limit_text)


def phrase(words: str) -> str:
    """'budget 20%', or 'no limit', of what `in_words` and `of_run` say."""
    return words if words == NO_LIMIT else f"budget {words}"


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
        likely: int | None = None,
    ) -> None:
        """`smallest`: feasible bytes. instead: what to do, where more is known than that; would_do: the same as options
        of `kvlens run` and their values, {} where no option alone would do. likely: bytes that it takes by estimate,
        where `smallest` is what no text goes below."""
        self.method, self.budget, self.smallest, self.full, self.likely = method, budget, smallest, full, likely
        estimated = "" if likely is None else f", by estimate {likely / full:.1%}"
        advice = instead or f"{raised_to(smallest / full)} or change the method's parameters"
        remedy = {} if instead else {"budget": percent_up(smallest / full)}
        self.would_do = dict(remedy if would_do is None else would_do)
        super().__init__(
            f"budget_infeasible: {method} needs at least {smallest:,} bytes on the device for this prompt "
            f"({smallest / full:.1%} of full KV{estimated}), "
            f"the budget is {budget:,} bytes ({budget / full:.1%}); {advice}."
        )


def percent_up(share: float) -> str:
    """A share as --budget takes it, rounded up to a thousandth; of what needs more than full KV 1, no limit."""
    return f"{min(1.0, -(-share * 1000 // 1) / 1000):.3f}"


def raised_to(share: float) -> str:
    """'raise --budget to 23.5%', the share that is needed."""
    enough = float(percent_up(share))
    return f"raise --budget to {100 * enough:g}%" + (f" ({NO_LIMIT})" if enough == 1 else "")


class BudgetAccount:
    """Owns the sum. Tensors are held under a name; their storage is counted once, whole, whether used or not.

    `peak` is the largest sum since `start_step`. `limit` is None (no limit) or bytes; `hold` refuses to pass it.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._held: dict[str, dict[int, int]] = {}
        self._apart: dict[str, tuple[str, int]] = {}
        self.resident = 0
        self.peak = 0

    def hold(self, name: str, *tensors: torch.Tensor) -> None:
        """Count `tensors` under `name` (replacing what was held there). Raises AssertionError past the limit: a method
        that gets there has a wrong plan, since infeasible budgets are refused before."""
        self.hold_storages(name, {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors})

    def hold_storages(self, name: str, sizes: dict[int, int]) -> None:
        """As `hold`, of storages by their address, with their bytes."""
        self._held[name] = sizes
        self._recount()

    def addresses(self) -> set[int]:
        """Return the addresses of all storages that are held."""
        return {address for sizes in self._held.values() for address in sizes}

    def release(self, name: str) -> None:
        self._held.pop(name, None)
        self._recount()

    def set_apart(self, name: str, owner: str, size: int) -> None:
        """Say `size` of the bytes held under `owner` under a name of their own."""
        self._apart[name] = owner, size

    def by_name(self) -> dict[str, int]:
        """Bytes held under each name."""
        named = {name: sum(storages.values()) for name, storages in self._held.items()}
        for name, (owner, size) in self._apart.items():
            named[owner] -= size
            named[name] = named.get(name, 0) + size
        return named

    def start_step(self) -> None:
        self.peak = self.resident

    def _recount(self) -> None:
        merged: dict[int, int] = {}
        for storages in self._held.values():
            merged.update(storages)
        self.resident = sum(merged.values())
        self.peak = max(self.peak, self.resident)
        if self.limit is not None and self.resident > self.limit:
            raise AssertionError(f"device holds {self.resident} bytes, the budget is {self.limit}: {self.by_name()}")
