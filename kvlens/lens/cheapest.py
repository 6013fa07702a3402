"""The search for the fewest bytes, asked of a run: what a trial of it is and costs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from kvlens.holds import Hold, Triple, held_bytes, holds_of
from kvlens.lens.attribution import attribute_records
from kvlens.lens.fewest import Attempt, Fewest, FewestBytes
from kvlens.lens.hold_changes import check_steps, drop_from_holds
from kvlens.lens.question import Question, unless
from kvlens.runs.repeat import Past
from kvlens.runs.request import Report
from kvlens.text.units import counted, si_bytes

if TYPE_CHECKING:
    from kvlens.engine.ranking import Records, Repeat

CANDIDATES = 64
"""(layer, KV head, span) among which the fewest bytes are looked for, at most"""
LEAST = 0.01
"""of the largest effect: what has less is ordered by what was missed of it"""


def fewest_bytes(
    question: Question,
    past: Past,
    from_step: int,
    most: int,
    report: Report,
    say: Callable[[str], None],
    cancelled: Callable[[], bool],
) -> tuple[Fewest, tuple[Hold, ...]]:
    """The (layer, KV head, span) that bring the answer back with the fewest held bytes, as `FewestBytes` finds them in
    `most` trials among those with most effect on the lost steps of the answer, on the reference's tokens, and behind
    them those that were missed most; and what is held for it, or, where nothing that was tried sufficed, all
    candidates. What the run dropped is first tried
    with the drop lifted alone, which costs nothing, and held where that does not suffice."""
    step, trials = question.lost_step(past), question.trials
    trials.ready()
    report("search", 0, most)
    shape, repeat, end = trials.engine.loaded.shape, trials.repeat(), question.answer_end
    watched = repeat.follow(end)
    spans = watched.holdable
    records = [(record.loss, record.oracle) for record in watched.steps]
    missed = attribute_records(records, shape.group, every_lost_step=True, unread=True)
    ranking_by_effect = _by_effect(repeat, watched, end)
    largest = max((effect for _, effect in ranking_by_effect), default=0.0)
    felt = [triple for triple, effect in ranking_by_effect if effect >= LEAST * largest]
    order = dict.fromkeys((*felt, *(triple for triple, _ in missed)))
    ranking = [triple for triple in order if triple[2] in spans][:CANDIDATES]
    if not ranking:
        raise ValueError(f"run {past.uid} missed no span that could be held: what it lost lies elsewhere.")
    check_steps(holds_of(ranking, spans, from_step), trials.drops)
    tried: list[Attempt] = []

    def test(triples: tuple[Triple, ...]) -> Attempt:
        unless(cancelled)
        holds = tuple(holds_of(triples, spans, from_step))
        beside = drop_from_holds(holds, trials.drops)
        best = min((trial.held_bytes for trial in tried if trial.restored), default=None)
        so_far = "nothing is back yet" if best is None else f"back with {si_bytes(best)}"
        doing = "Holding" if beside else "Lifting the drop of"
        label = f"{counted(len(triples), 'span')} of single KV heads, {si_bytes(held_bytes(beside, shape))}"
        say(f"{doing} {label}; so far {so_far}.")
        ways = ((question.lifting(holds), beside), (question, holds)) if beside != holds else ((question, holds),)
        for request, these in ways:
            loss = request.losses(these, step + 1)[step]
            assert loss is not None, "every step of a forced run is compared"
            back = loss.agrees and (not request.by_answer or request.restored(these))
            search = Attempt(triples, held_bytes(these, shape), loss.kl, back)
            if back:
                break
        tried.append(search)
        report("search", len(tried), most)
        return search

    def cost(triple: Triple) -> int:
        return held_bytes(drop_from_holds(holds_of((triple,), spans), trials.drops), shape)

    search = FewestBytes(test, cost, most).run(ranking)
    best_triples = search.best.triples if search.best is not None else tuple(ranking)
    return search, tuple(holds_of(best_triples, spans, from_step))


def _by_effect(repeat: Repeat, watched: Records, end: int) -> list[tuple[Triple, float]]:
    """Return the ranking of effects; empty where effects cannot be found: regret is left to go by."""
    with suppress(RuntimeError, MemoryError):  # no gradients, or no room for them
        effects = repeat.rank(end, records=watched)
        return [] if effects is None else list(zip(effects.order, effects.effect.tolist(), strict=True))
    return []
