"""Attribution of a loss: which (layer, KV head, span) had most effect on the answer, or most regret, where the answer
was lost.

Effects are of all lost steps of the answer, on full KV's tokens (kvlens.engine.ranking): an answer of several tokens
may lie in several spans, of which the step of loss knows the first only. Regret is that of a stored run's step of loss,
or, of a run in memory, of all lost steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from kvlens.holds import Triple
from kvlens.instruments import Loss, Oracle
from kvlens.lens.reasons import explain
from kvlens.store.reader import TraceReader

LEAST_EFFECT = 1e-6
"""logits; a smaller effect is rounding, as of a layer that keeps its window"""


def lost_steps(loss: pd.DataFrame) -> list[int]:
    """Steps whose most probable token is not full KV's, in order; the first is the step of loss. `loss` as
    TraceReader.loss gives it."""
    return loss.loc[~loss["agrees"].astype(bool), "step"].astype(int).tolist()


def missed(reader: TraceReader, step: int) -> pd.DataFrame:
    """Return `TraceReader.triples` of what was missed at a step (regret, or unread mass) or has an effect on the lost
    steps, in the lens's order: by the place in the ranking of effects, behind that by regret."""
    triples = reader.triples(step)
    triples = triples[(triples["regret"] > 0) | (triples["unread"] > 0) | (triples["effect"].abs() >= LEAST_EFFECT)]
    return triples.sort_values("place", na_position="last", kind="stable", ignore_index=True)


def attribute(reader: TraceReader) -> pd.DataFrame:
    """Return layer, kv_head, span, regret at the step of loss, effect on the lost steps and place in their ranking
    (NaN: none was recorded), ordered as by `missed`. Regret is the mean over the query heads of a KV head; a lower
    bound where one did not list a span. Empty where nothing was lost or full attention was not recorded."""
    columns = ["layer", "kv_head", "span", "regret", "effect", "place"]
    steps = lost_steps(reader.loss())
    missed_triples = missed(reader, steps[0]) if steps else None
    if missed_triples is None or missed_triples.empty:
        return pd.DataFrame({name: pd.Series(dtype="float" if name in columns[3:] else "int") for name in columns})
    return missed_triples[columns]


def with_reasons(reader: TraceReader, triples: pd.DataFrame, step: int, top: int) -> pd.DataFrame:
    """The first `top` triples with why each was not attended exactly at `step`: kind and sentence
    (kvlens.lens.reasons)."""
    named_triples = triples.head(top).copy()
    named = named_triples[["layer", "kv_head", "span"]].astype(int).to_numpy().tolist()
    reasons = [explain(reader, step, *triple) for triple in named]
    return named_triples.assign(reason=[reason.kind for reason in reasons], why=[reason.says for reason in reasons])


def attribute_records(
    records: Iterable[tuple[Loss | None, Oracle | None]], group: int, every_lost_step: bool, unread: bool = False
) -> list[tuple[Triple, float]]:
    """By regret, of a run that was not stored: its steps' losses and full attention, in order. group: query heads per
    KV head. unread: where more of full attention lies on a span's unread tokens than its regret shows, that counts."""
    total: dict[Triple, float] = {}
    for loss, oracle in records:
        if loss is None or loss.agrees or oracle is None:
            continue
        for triple, regret in _regrets(oracle, group, unread):
            total[triple] = total.get(triple, 0.0) + regret
        if not every_lost_step:
            break
    return sorted(total.items(), key=lambda item: (-item[1], item[0]))


def _regrets(oracle: Oracle, group: int, unread: bool) -> Sequence[tuple[Triple, float]]:
    regret = oracle.regret
    if unread and oracle.wanted_unread is not None:
        regret = np.maximum(regret, oracle.wanted_unread)
    layers, heads, places = np.nonzero((oracle.span >= 0) & (regret > 0))
    regret_of: dict[Triple, float] = {}
    for layer, head, place in zip(layers.tolist(), heads.tolist(), places.tolist(), strict=True):
        triple = layer, head // group, int(oracle.span[layer, head, place])
        regret_of[triple] = regret_of.get(triple, 0.0) + float(regret[layer, head, place]) / group
    return list(regret_of.items())
