"""What was tried on a run: its stored repeats with something held, or asked for with another budget or other
parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from kvlens.lens.beyond import beyond
from kvlens.lens.pieces import Piece, pieces_of
from kvlens.meta import Counterfactual, Held, RunMeta
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader, list_runs

RESTORED = {True: "yes", False: "no", None: "cannot be told"}
"""of a try, in a word"""
NAMED = 6
"""(layer, KV head) pairs that a sentence names; the others are counted"""


@dataclass(frozen=True)
class Try:
    """A stored repeat of a run, as its meta tells it."""

    uid: str
    holds: tuple[Held, ...]
    """as `try_of` has them also those that the run it repeats had; see `beyond`"""
    changed: dict[str, str]
    """what was asked for otherwise, as it was given"""
    summary: Counterfactual | None
    """None: the repeat did not come to an end"""
    full_kv_bytes: int | None
    budget_bytes: int | None
    """None: no limit"""
    layers: int
    kv_heads: int

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, KV head) that any span is held for."""
        return sorted({head for hold in self.holds for head in hold.heads})

    @property
    def from_step(self) -> int:
        return min((hold.from_step for hold in self.holds), default=0)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What was held, as a command on the run it repeats writes it: by positions where that run's spans may be
        others."""
        named = [hold.model_copy(update={"whole": False}) for hold in self.holds] if self.changed else self.holds
        return pieces_of(named, self.layers, self.kv_heads)

    @property
    def budget(self) -> int | None:
        """Device bytes it was allowed; None: not recorded."""
        return self.budget_bytes or self.full_kv_bytes

    def beyond(self, had: Iterable[Held]) -> Try:
        """The same without what the run it repeats held already."""
        return replace(self, holds=beyond(self.holds, had))

    @property
    def all_heads(self) -> int:
        return self.layers * self.kv_heads

    def words(self) -> str:
        """'span 12 (tokens 300-331) held exactly resident for L0 KV1, L1 KV0 from step 3 on'; where something was asked
        for otherwise 'tokens 300-331 held ...; budget 30%', as its spans may be others than those of the run it
        repeats."""
        named: dict[str, list[tuple[int, int]]] = {}
        for hold in self.holds:
            where = f"tokens {hold.tok_start}–{hold.tok_end - 1}"
            name = f"span {hold.span} ({where})" if hold.whole else f"{where} of span {hold.span}"
            named.setdefault(where if self.changed else name, []).extend(hold.heads)
        return self._said(named, "held exactly resident for {heads} from step {step} on", "held exactly resident")

    def brief(self) -> str:
        """The same for a table: 'span 12 held for L0 KV1, L1 KV0 from step 3'."""
        named: dict[str, list[tuple[int, int]]] = {}
        for piece in self.pieces:
            named.setdefault(piece.what(), []).extend(piece.heads(self.layers, self.kv_heads))
        return self._said(named, "held for {heads} from step {step}", "held")

    def _said(self, named: dict[str, list[tuple[int, int]]], alike: str, apart: str) -> str:
        """What is named beside the heads it is held for; said once where they are the same for all."""
        groups: dict[str, list[str]] = {}
        for name, heads in named.items():
            groups.setdefault(self._whose(sorted(set(heads))), []).append(name)
        said = []
        if len(groups) == 1:
            ((whose, names),) = groups.items()
            said.append(f"{', '.join(names)} {alike.format(heads=whose, step=self.from_step)}")
        elif groups:
            each = ", ".join(f"{', '.join(names)} for {whose}" for whose, names in groups.items())
            said.append(f"{each} {apart} from step {self.from_step} on")
        said += [self.otherwise()] if self.changed else []
        return "; ".join(said) or "nothing held that the run did not hold already"

    def otherwise(self) -> str:
        """'budget 30%'."""
        return ", ".join(f"{name} {value}" for name, value in self.changed.items())

    def _whose(self, heads: list[tuple[int, int]]) -> str:
        whole = len(heads) == self.all_heads and len(heads) > 1
        if whole:
            return f"all {len(heads)} KV heads"
        names = ", ".join(f"L{layer} KV{head}" for layer, head in heads[:NAMED])
        return names + (f" and {len(heads) - NAMED} more KV heads" if len(heads) > NAMED else "")

    def more_bytes(self, budget_bytes: int | None) -> int | None:
        """Device bytes that it had beyond the run it repeats, whose budget is `budget_bytes` (None: no limit): what was
        held, and what the budget was raised by; less than none where it was lowered. None: not recorded."""
        held = None if self.summary is None else self.summary.held_bytes
        return None if held is None else held + self.raised_bytes(budget_bytes)

    def raised_bytes(self, budget_bytes: int | None) -> int:
        """Of these, what the budget was raised by."""
        mine, its = self.budget, budget_bytes or self.full_kv_bytes
        return 0 if mine is None or its is None else mine - its


def try_of(meta: RunMeta, uid: str) -> Try | None:
    """The try that a run's meta describes; None for other runs."""
    if not meta.hold and not meta.changed:
        return None
    return Try(
        uid,
        meta.hold,
        dict(meta.changed),
        meta.whatif,
        meta.full_kv_bytes,
        meta.budget_bytes,
        meta.layers,
        meta.kv_heads,
    )


def uids(uid: str, table: pd.DataFrame) -> list[str]:
    """The tries on a run that came to an end, newest first. `table`: as list_runs gives it."""
    other = table["hold"].eq(True) | table["changed"].eq(True)
    return [str(one) for one in table.loc[(table["parent"] == uid) & other & (table["status"] == "completed"), "uid"]]


def tries(uid: str, table: pd.DataFrame, meta_of: Callable[[str], RunMeta]) -> list[Try]:
    """What was tried on a run, newest first, without what the run held itself. Repeats that cannot be read are left
    out: the list of runs names them. meta_of: raises TraceError for those."""
    found = uids(uid, table)
    try:
        had = meta_of(uid).hold if found else ()
    except TraceError:
        had = ()
    beside = (one.beyond(had) for one in _read(found, meta_of))
    # a run that holds something may have been repeated as it is
    return [one for one in beside if one.holds or one.changed or one.summary is not None]


def _read(found: Iterable[str], meta_of: Callable[[str], RunMeta]) -> Iterable[Try]:
    for one in found:
        try:
            tried = try_of(meta_of(one), one)
        except TraceError:
            continue
        if tried is not None:
            yield tried


def tries_in(runs_dir: Path, uid: str) -> list[Try]:
    """The same, read from the folder of runs."""

    def meta_of(one: str) -> RunMeta:
        with TraceReader.open(runs_dir, one) as reader:
            return reader.meta

    return tries(uid, list_runs(runs_dir), meta_of)
