"""What was tried on a run: its stored repeats with something held or dropped, or asked for with another budget or
other parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlens.lens.hold_changes import describe_kept, new_holds
from kvlens.lens.knob import asked_in_words
from kvlens.lens.pieces import Piece, pieces_of
from kvlens.meta import RunMeta
from kvlens.metaparts import Counterfactual, Held

RESTORED = {True: "yes", False: "no", None: "cannot be told"}
"""of a try, in a word"""
STANDS = {True: "it stands without it", False: "it hangs on it"}
"""of an answer that was right before something was dropped"""
WITH_BOTH = {
    True: "it is right with the one and without the other",
    False: "it is wrong with the one, without the other",
}
"""of an answer, where something was held and something else dropped"""
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
    drops: tuple[Held, ...] = ()
    """as `holds`, of what was not attended"""
    kept: str = ""
    """what is held or dropped just as in the run it repeats: '12 tokens dropped'; told `beyond` that run alone"""

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, KV head) that any span is held or dropped for."""
        return sorted({head for token_range in (*self.holds, *self.drops) for head in token_range.heads})

    @property
    def from_step(self) -> int:
        return min((token_range.from_step for token_range in (*self.holds, *self.drops)), default=0)

    @property
    def nothing(self) -> bool:
        """It is the run it repeats, as it was, where it is told `beyond` that run: fed other tokens at most."""
        return not (self.holds or self.drops or self.changed)

    @property
    def mixed(self) -> bool:
        """Something was held and something else dropped."""
        return bool(self.holds and self.drops)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What was held, as a command on the run it repeats writes it: by positions where that run's spans may be
        others."""
        return self._pieces(self.holds)

    @property
    def dropped_pieces(self) -> tuple[Piece, ...]:
        """The same of what was dropped."""
        return self._pieces(self.drops)

    def _pieces(self, ranges: tuple[Held, ...]) -> tuple[Piece, ...]:
        named = [token_range.model_copy(update={"whole": False}) for token_range in ranges] if self.changed else ranges
        return pieces_of(named, self.layers, self.kv_heads)

    @property
    def budget(self) -> int | None:
        """Device bytes it was allowed; None: not recorded."""
        return self.budget_bytes or self.full_kv_bytes

    def beyond(self, had: RunMeta) -> Try:
        """The same without what the run it repeats held or dropped already."""
        return replace(
            self,
            holds=new_holds(self.holds, had.hold),
            drops=new_holds(self.drops, had.drop),
            kept=describe_kept(self.holds, self.drops, had),
        )

    @property
    def all_heads(self) -> int:
        return self.layers * self.kv_heads

    def words(self) -> str:
        """'span 12 (tokens 300-331) held exactly resident for L0 KV1, L1 KV0 from step 3 on'; where something was asked
        for otherwise 'tokens 300-331 held ...; budget 30%', as its spans may be others than those of the run it
        repeats."""
        phrases = []
        for ranges, verb in ((self.holds, "held exactly resident"), (self.drops, "dropped")):
            named: dict[str, list[tuple[int, int]]] = {}
            for token_range in ranges:
                where = f"tokens {token_range.tok_start}–{token_range.tok_end - 1}"
                name = (
                    f"span {token_range.span} ({where})" if token_range.whole else f"{where} of span {token_range.span}"
                )
                named.setdefault(where if self.changed else name, []).extend(token_range.heads)
            phrases += self._name_groups(named, verb + " for {heads} from step {step} on", verb)
        return self._joined(phrases)

    def brief(self) -> str:
        """The same for a table: 'span 12 held for L0 KV1, L1 KV0 from step 3'."""
        phrases = []
        for pieces, verb in ((self.pieces, "held"), (self.dropped_pieces, "dropped")):
            named: dict[str, list[tuple[int, int]]] = {}
            for piece in pieces:
                named.setdefault(piece.describe_tokens(), []).extend(piece.heads(self.layers, self.kv_heads))
            phrases += self._name_groups(named, verb + " for {heads} from step {step}", verb)
        return self._joined(phrases)

    def _joined(self, phrases: list[str]) -> str:
        if self.changed:
            kept_note = f" ({self.kept}, as in that run)" if self.kept else ""
            return "; ".join([*phrases, self.otherwise()]) + kept_note
        return "; ".join(phrases) or "nothing held or dropped that the run did not hold or drop already"

    def _name_groups(self, named: dict[str, list[tuple[int, int]]], alike: str, apart: str) -> list[str]:
        """What is named beside the heads it is held or dropped for; said once where they are the same for all."""
        groups: dict[str, list[str]] = {}
        for name, heads in named.items():
            groups.setdefault(self._name_heads(sorted(set(heads))), []).append(name)
        phrases = []
        if len(groups) == 1:
            ((head_names, names),) = groups.items()
            phrases.append(f"{', '.join(names)} {alike.format(heads=head_names, step=self.from_step)}")
        elif groups:
            each = ", ".join(f"{', '.join(names)} for {head_names}" for head_names, names in groups.items())
            phrases.append(f"{each} {apart} from step {self.from_step} on")
        return phrases

    def outcome(self) -> str:
        """What came of the answer, in a word or a few."""
        return outcome(self.summary)

    def otherwise(self) -> str:
        """'budget 30%', 'no limit', 'sinks 6'."""
        return ", ".join(asked_in_words(*change) for change in self.changed.items())

    def _name_heads(self, heads: list[tuple[int, int]]) -> str:
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
        own_budget, its = self.budget, budget_bytes or self.full_kv_bytes
        return 0 if own_budget is None or its is None else own_budget - its


def outcome(summary: Counterfactual | None) -> str:
    """Of something held: whether it brought the answer back. Of something dropped: whether the answer stands without
    it, where it was right before. Where no answer is known: what became of full KV's tokens."""
    back = None if summary is None else summary.restored if summary.stands is None else summary.stands
    if summary is None or back is None:
        return RESTORED[None]
    if not summary.answer_known:
        if not back:
            return f"leaves full KV at step {summary.step}"
        return "same tokens" if summary.stands else f"same token at step {summary.step}"
    if summary.dropped_tokens is None:
        return RESTORED[back]
    if summary.held_tokens:
        return WITH_BOTH[back]
    if summary.stands is not None:
        return STANDS[back]
    return "it is right without it" if back else "it is wrong without it too"
