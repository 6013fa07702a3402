"""The search for the fewest extra bits: which keys or values of which KV head a quantised run has to store better for
the answer to be back.

Effects rank the sides of KV heads (kvlens.engine.bit_effects). The search gives the first ones exact numbers, as
`FewestBytes` finds a set that suffices and from which none can be left out. Then it looks for sets in fewer bits, among
beginnings of the ranking that take fewer bytes. Every set is a run of the method with the parameter `finer`; the budget
is raised by what the set takes, so that the method keeps the tokens it kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvlens.budget import Budget
from kvlens.finer import EXACT, SIDES, Finer, finer_text, parse_finer
from kvlens.holds import Triple
from kvlens.lens.fewest import Attempt, FewestBytes
from kvlens.lens.question import Question, unless
from kvlens.metaparts import Search, Tested
from kvlens.refusal import Refusal
from kvlens.runs.repeat import Past
from kvlens.runs.request import Report
from kvlens.text.units import counted, si_bytes

if TYPE_CHECKING:
    from kvlens.engine.bit_effects import PackedPrompt, Side
    from kvlens.lens.trials import Trials

NARROWER = (8, 4, 3, 2)
"""bits that are tried after exact numbers"""
NAMED = 16
"""sides whose effects are kept"""


def fewest_bits(
    question: Question, past: Past, most: int, report: Report, say: Callable[[str], None], cancelled: Callable[[], bool]
) -> tuple[Search, dict[str, str]]:
    """Return the search in at most `most` trials, and what the run is to have otherwise: the parameter `finer` and,
    where there is a limit, the budget; of all sides exact, where nothing brings the answer back. Raises Refusal
    (`nothing_packed`, `nothing_lost`)."""
    from kvlens.engine.bit_effects import bit_effects

    step, trials = question.lost_step(past), question.trials
    packed = None if not hasattr(trials.params, "finer") else trials.packed()
    if packed is None:
        raise Refusal(
            f"run {past.uid} stores no numbers in few bits: search for the fewest bytes instead.",
            code="nothing_packed",
            uid=past.uid,
        )
    report("search", 0, most)
    losses = question.losses((), question.answer_end)
    lost = {number: loss.top_token for number, loss in enumerate(losses) if loss is not None and not loss.agrees}
    effects: dict[Side, float] = {}
    with suppress(RuntimeError, MemoryError):  # no gradients, or no room for them
        effects = bit_effects(
            trials.engine, trials.reading(), packed, trials.reference, lost, lambda: unless(cancelled)
        )
    if not effects:
        say("Sides are tried in the order of layers: no effects could be measured.")
    search = _Search(question, packed, step, most, report, say, cancelled)
    ranking = sorted(search.sides, key=lambda side: -effects.get((side[0], side[1], SIDES[side[2]]), -math.inf))
    best, ended = search.run(ranking)
    finer = search.text(best.triples, best.bits) if best is not None else ""
    changed = with_room(trials, finer or search.text(tuple(ranking), EXACT))
    order = sorted(effects.items(), key=lambda pair: -pair[1])[:NAMED]
    return Search(
        tried=len(search.attempts),
        most=most,
        ended=ended,
        kl=None if best is None else best.kl,
        finer=finer,
        extra_bytes=None if best is None else best.held_bytes,
        extra_bits=None if best is None else best.held_bytes * 8 / search.numbers,
        side_effects=tuple((*side, effect) for side, effect in order),
        tests=tuple(
            Tested(
                size=len(test.triples), held_bytes=test.held_bytes, kl=test.kl, restored=test.restored, bits=test.bits
            )
            for test in search.attempts
        ),
    ), changed


def with_room(trials: Trials, finer: str) -> dict[str, str]:
    """Return the changes of a run for the parameter `finer`: the budget too where there is a limit, raised by what the
    sides take, as held tokens raise it."""
    limit = _raised_budget(trials, finer) if hasattr(trials.params, "finer") else None
    return {"finer": finer} | ({} if limit is None else {"budget": limit.text})


def _raised_budget(trials: Trials, finer: str) -> Budget | None:
    """Return the budget raised by what `finer` takes; None: there is no limit."""
    from kvlens.engine.observed import method_context

    context = trials.engine.context(trials.prompt, trials.budget, trials.options)
    if context.budget_bytes is None:
        return None
    method: Any = trials.method
    run_context, finer_params = method_context(context, False), replace(trials.params, finer=finer)
    limit = context.budget_bytes + method.raised(trials.params, finer_params, run_context)
    return Budget(limit, "bytes", f"{limit}B")


@dataclass(frozen=True)
class _Try(Attempt):
    """A set of (layer, KV head, number of the side) with other bits; `held_bytes` are those it takes more."""

    bits: int = EXACT


class _Search:
    """Owns the attempts of one search."""

    def __init__(
        self,
        question: Question,
        packed: PackedPrompt,
        step: int,
        most: int,
        report: Report,
        say: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self._question, self._packed, self._step, self._most = question, packed, step, most
        self._report, self._say, self._cancelled = report, say, cancelled
        self.attempts: list[_Try] = []
        shape, form = packed.context.shape, packed.form
        self._had: tuple[Finer, ...] = parse_finer(question.trials.params.finer)
        finer_bits = {(unit.layer, unit.kv_head, unit.side): unit.bits for unit in form.finer}
        self._bits: dict[Triple, int] = {}
        self._rows: dict[Triple, int] = {}
        for layer in range(shape.layers):
            for side, (name, width, rows) in enumerate(
                zip(SIDES, form.bits_of(layer), form.rows(layer, shape.kv_heads), strict=True)
            ):
                for head in range(shape.kv_heads):
                    bits = finer_bits.get((layer, head, name), width)
                    if bits != EXACT and rows:
                        self._bits[layer, head, side] = bits
                        self._rows[layer, head, side] = rows // shape.kv_heads
        self.sides: tuple[Triple, ...] = tuple(self._bits)
        self.numbers = max(1, sum(self._rows.values()) * shape.head_dim)
        """packed numbers of the whole cache"""

    def run(self, ranking: Sequence[Triple]) -> tuple[_Try | None, bool]:
        """Return the attempt of fewest bytes that sufficed, None if none did, and whether nothing was left to try."""
        whole = self._test(tuple(ranking), EXACT)
        if not whole.restored:
            return None, True
        ended = True
        for bits in (EXACT, *(bits for bits in NARROWER if bits in self._packed.form.widths)):
            candidates = self._beginning(ranking, bits)
            if not candidates:
                continue
            remaining = self._most - len(self.attempts)
            if remaining <= 0:
                ended = False
                break
            search = FewestBytes(partial(self._test, bits=bits), partial(self._cost, bits=bits), remaining)
            ended &= search.run(candidates).ended
        back = [attempt for attempt in self.attempts if attempt.restored]
        return min(back, key=lambda attempt: (attempt.held_bytes, len(attempt.triples))), ended

    def text(self, triples: Sequence[Triple], bits: int) -> str:
        """Return the parameter `finer` with these sides beside those that the run had."""
        units = {Finer(layer, head, SIDES[side], bits) for layer, head, side in triples}
        named = {(unit.layer, unit.kv_head, unit.side) for unit in units}
        had = [unit for unit in self._had if (unit.layer, unit.kv_head, unit.side) not in named]
        return ",".join(filter(None, (finer_text(had), finer_text(units))))

    def _cost(self, triple: Triple, bits: int) -> int:
        """Return the bytes that a side takes more at so many bits."""
        side = triple[2]
        form, shape = self._packed.form, self._packed.context.shape
        coarse, fine = (
            shape.head_token_bytes / 2 if width == EXACT else form.side_bytes(shape.head_dim, SIDES[side], width)
            for width in (self._bits[triple], bits)
        )
        return round(self._rows[triple] * (fine - coarse))

    def _beginning(self, ranking: Sequence[Triple], bits: int) -> tuple[Triple, ...]:
        """Return the first sides of the ranking with fewer bits than `bits`, as many as take fewer bytes together than
        the best attempt."""
        back = [attempt.held_bytes for attempt in self.attempts if attempt.restored]
        beginning: list[Triple] = []
        total, limit = 0, min(back)
        for triple in ranking:
            if bits != EXACT and self._bits[triple] >= bits:
                continue
            total += self._cost(triple, bits)
            if total >= limit:
                break
            beginning.append(triple)
        return tuple(beginning)

    def _test(self, triples: tuple[Triple, ...], bits: int) -> _Try:
        """Run the method with these sides in so many bits."""
        unless(self._cancelled)
        finer, extra = self.text(triples, bits), sum(self._cost(triple, bits) for triple in triples)
        back = [attempt.held_bytes for attempt in self.attempts if attempt.restored]
        so_far = f"back with {si_bytes(min(back))} more" if back else "nothing is back yet"
        width = "exactly" if bits == EXACT else f"in {bits} bits"
        self._say(f"Storing {counted(len(triples), 'side')} of KV heads {width}, {si_bytes(extra)} more; {so_far}.")
        trials = self._question.trials
        question = self._question.with_params(replace(trials.params, finer=finer), _raised_budget(trials, finer))
        loss = question.losses((), self._step + 1)[self._step]
        assert loss is not None, "every step of a forced run is compared"
        is_back = loss.agrees and (not question.by_answer or question.restored(()))
        attempt = _Try(triples, extra, loss.kl, is_back, bits)
        self.attempts.append(attempt)
        self._report("search", len(self.attempts), self._most)
        return attempt
