"""Attribution of a loss: which (layer, KV head, span) had most regret, or most effect, where the answer was lost.

Two scopes: the step of loss alone, and all lost steps of a forced run, whose contexts are full KV's at every step. An
answer of several tokens may lie in several spans; then the step of loss knows the first of them only, and the lost
steps know all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from kvlens.instruments import Effects, Loss, Oracle
from kvlens.lens.reasons import explain
from kvlens.store.reader import TraceReader

Triple = tuple[int, int, int]
"""(layer, KV head, span)"""


def lost_steps(loss: pd.DataFrame) -> list[int]:
    """Steps whose most probable token is not full KV's, in order; the first is the step of loss. `loss` as
    TraceReader.loss gives it."""
    return loss.loc[~loss["agrees"].astype(bool), "step"].astype(int).tolist()


def attribute(reader: TraceReader, every_lost_step: bool = False) -> pd.DataFrame:
    """layer, kv_head, span, regret, n_steps, most regret first: regret at the step of loss, or added over the lost
    steps (of a free run there is one). Means over the query heads of a KV head; lower bounds where a query head did not
    list a span. Empty where nothing was lost or full attention was not recorded."""
    steps = lost_steps(reader.loss())
    frames = [reader.triples(step) for step in (steps if every_lost_step else steps[:1])]
    columns = ["layer", "kv_head", "span", "regret"]
    if not frames or all(frame.empty for frame in frames):
        return pd.DataFrame(
            {name: pd.Series(dtype="float" if name == "regret" else "int") for name in [*columns, "n_steps"]}
        )
    both = pd.concat([frame[columns] for frame in frames])
    both = both[both["regret"] > 0]
    summed = both.groupby(columns[:3], as_index=False).agg(regret=("regret", "sum"), n_steps=("regret", "size"))
    return summed.sort_values(["regret", *columns[:3]], ascending=[False, True, True, True], ignore_index=True)


def with_reasons(reader: TraceReader, triples: pd.DataFrame, step: int, top: int) -> pd.DataFrame:
    """The first `top` triples with why each was not attended exactly at `step`: kind and sentence
    (kvlens.lens.reasons)."""
    first = triples.head(top).copy()
    named = first[["layer", "kv_head", "span"]].astype(int).to_numpy().tolist()
    found = [explain(reader, step, *triple) for triple in named]
    return first.assign(reason=[reason.kind for reason in found], why=[reason.says for reason in found])


def attribute_records(
    records: Iterable[tuple[Loss | None, Oracle | None]], group: int, every_lost_step: bool, unread: bool = False
) -> list[tuple[Triple, float]]:
    """`attribute` of a run that was not stored: its steps' losses and full attention, in order. group: query heads per
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


def most_effect(found: Iterable[Effects]) -> list[tuple[Triple, float]]:
    """By effect on the choice, in logits, added over the steps given."""
    total: dict[Triple, float] = {}
    for step in found:
        for layer, head, span, effect in zip(
            step.layer.tolist(), step.kv_head.tolist(), step.span.tolist(), step.effect.tolist(), strict=True
        ):
            total[layer, head, span] = total.get((layer, head, span), 0.0) + effect
    return sorted(total.items(), key=lambda item: (-item[1], item[0]))


def _regrets(oracle: Oracle, group: int, unread: bool) -> Sequence[tuple[Triple, float]]:
    regret = np.maximum(0.0, oracle.full.astype(np.float64) - oracle.mass)
    if unread and oracle.unread is not None:
        regret = np.maximum(regret, oracle.unread)
    layers, heads, places = np.nonzero((oracle.span >= 0) & (regret > 0))
    found: dict[Triple, float] = {}
    for layer, head, place in zip(layers.tolist(), heads.tolist(), places.tolist(), strict=True):
        triple = layer, head // group, int(oracle.span[layer, head, place])
        found[triple] = found.get(triple, 0.0) + float(regret[layer, head, place]) / group
    return list(found.items())
