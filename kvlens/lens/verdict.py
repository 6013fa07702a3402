"""The verdict on a run: the step at which it lost against full KV, and the span that was missed most there: what had
most effect on the choice, or, where effects were not recorded, most regret. Recorded columns only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from kvlens.holds import joined
from kvlens.lens.attribution import missed as ordered
from kvlens.lens.facts import Facts
from kvlens.lens.lines import Line, inside
from kvlens.lens.output import becoming
from kvlens.lens.reasonkinds import Reason
from kvlens.lens.reasons import reason
from kvlens.store.reader import TraceReader

LEAST_MASS, LEAST_EFFECT = 0.005, 0.05
"""share of full KV's attention (regret, or unread), and logits of effect: below both nothing is called missed"""


def steps_in_words(steps: Sequence[int]) -> str:
    """Return 'at the step of loss', or 'over lost steps 2-5'."""
    return "at the step of loss" if len(steps) < 2 else f"over {_named_steps(steps)}"


def _named_steps(steps: Sequence[int]) -> str:
    """Return 'lost step 4', or 'lost steps 2-5, 7'."""
    ranges = joined((step, step + 1) for step in steps)
    named = ", ".join(str(start) if end - start == 1 else f"{start}-{end - 1}" for start, end in ranges)
    return f"lost step{'s' if len(steps) > 1 else ''} {named}"


@dataclass(frozen=True)
class Missed:
    """The (layer, KV head, span) that was missed most at a step. Masses are means over the query heads of the KV
    head."""

    layer: int
    kv_head: int
    q_head: int
    """the query head of the group that missed most"""
    span: int
    kind: str
    tok_start: int
    tok_end: int
    """tokens [tok_start, tok_end) at the span's birth"""
    reference: float | None
    """full KV's own attention mass on the span; None: not recorded"""
    own_query: float
    """own-query mass: full attention by the run's own query"""
    mass: float
    """this method's"""
    regret: float
    """of full KV's own mass, or, where that was not recorded, of the own-query mass"""
    unread: float | None
    """of the same mass, what lies on tokens that were attended in no form; None: not recorded"""
    state: str | None
    """where the span lay for this KV head while the step attended, one of rows.SPAN_STATES; None: not recorded"""
    reason: Reason
    """why it was not attended exactly"""
    h2d_bytes: int | None
    """bytes of this span that moved to the device at the step, over all layers; None: copies were not recorded"""
    effect: float | None = None
    """logits: what its absence took from the leads of full KV's tokens at `effect_steps` (kvlens.engine.effect); None:
    none was recorded"""
    lead: float | None = None
    """logits: of full KV's tokens above the method's, under full KV, added over `effect_steps`; None: not recorded"""
    effect_steps: tuple[int, ...] = ()
    """the lost steps of the answer, on full KV's tokens; empty: the step of loss alone"""

    @property
    def full(self) -> float:
        """Full KV's own mass where it was recorded, else the own-query mass."""
        return self.own_query if self.reference is None else self.reference

    @property
    def later_steps(self) -> tuple[int, ...]:
        """The lost steps after the step of loss, where full KV does not read the span at the step of loss and the
        effect is of the steps after it; empty: the masses are of the step that the effect is about."""
        unread_yet = self.effect is not None and max(self.full, self.own_query) < LEAST_MASS
        return self.effect_steps[1:] if unread_yet else ()

    def mass_words(self, digits: int = 2) -> str:
        """Return 'full KV's mass on it 0.62, own-query mass 0.31, this run's 0.01'; a mass that was not recorded is
        said to be so. Where the effect is of later steps (`later_steps`), return that in place of the masses."""
        if self.later_steps:
            return (
                f"full KV's mass on it is below {LEAST_MASS} at the step of loss; its effect comes later, at "
                f"{_named_steps(self.later_steps)}"
            )
        reference = "not recorded" if self.reference is None else f"{self.reference:.{digits}f}"
        own_query, mass = f"{self.own_query:.{digits}f}", f"{self.mass:.{digits}f}"
        return f"full KV's mass on it {reference}, own-query mass {own_query}, this run's {mass}"

    def regret_words(self, digits: int = 2) -> str:
        """Return ', regret 0.61'; '' where the masses of the step of loss do not matter (`later_steps`)."""
        return "" if self.later_steps else f", regret {self.regret:.{digits}f}"

    def effect_words(self) -> str:
        """Return 'missing it lowers full KV's lead by 9.18 of 23.40 logits, over lost steps 2-5', or the sentence of
        one step; '' if no effect was recorded."""
        if self.effect is None or self.lead is None:
            return ""
        where = f", {steps_in_words(self.effect_steps)}" if len(self.effect_steps) > 1 else ""
        return f"missing it lowers full KV's lead by {self.effect:.2f} of {self.lead:.2f} logits{where}"


@dataclass(frozen=True)
class Verdict:
    """The first step whose most probable token is not full KV's, and what was missed there."""

    step: int
    expected: str
    """the token full KV chose"""
    got: str
    """the most probable token under the method"""
    kl: float
    """KL(full || method), nats"""
    ref_logprob: float
    """log-probability of the expected token under full KV, nats"""
    logprob: float
    """and under the method"""
    h2d_bytes: int | None
    """all bytes that moved to the device at the step; None: not recorded"""
    unnamed_bytes: int
    """of these, bytes of copies that name no span"""
    missed: Missed | None
    """None: full attention's masses were not recorded at this step, or nothing was missed at it (`nothing_missed`)"""
    nothing_missed: bool = False
    """full attention's masses were recorded at this step, and nothing was missed at it by `LEAST_MASS` or
    `LEAST_EFFECT`"""
    lost_inside: Line | None = None
    """the tokens with most full attention that no span's regret shows, since the rest of their span was read"""

    def loss_words(self) -> str:
        """What became of the expected token's log-probability, and KL: neither moves with a shift of all logits."""
        return (
            f"log-probability of full KV's token {_figure(self.ref_logprob)} under full KV, {_figure(self.logprob)} in "
            f"this run · KL {_figure(self.kl, ' nats')}"
        )


def _figure(value: float, unit: str = "") -> str:
    """Return three digits with the unit, or "not recorded" for NaN."""
    return "not recorded" if math.isnan(value) else f"{value:.3g}{unit}"


def verdict(reader: TraceReader, missed: bool = True) -> Verdict | None:
    """None when the loss was not recorded or no step was lost; `reader.loss()` tells which. missed: ask what was missed
    there, and why, which most of the time goes to."""
    loss = reader.loss()
    lost = loss[~loss["agrees"].astype(bool)]
    if lost.empty:
        return None
    first_loss = lost.iloc[0]
    step = int(first_loss["step"])
    moved = reader.transfers(step=step)
    moved = moved[moved["direction"] == "h2d"]
    worst = missed_most(reader, step, moved) if missed else None
    return Verdict(
        step,
        becoming(reader, step, str(first_loss["ref_text"]), reader.meta.reference_output),
        becoming(reader, step, str(first_loss["top_text"]), reader.meta.output_text),
        float(first_loss["kl"]),
        float(first_loss["ref_logprob"]),
        float(first_loss["logprob"]),
        _moved_bytes(reader, step, moved),
        int(moved.loc[moved["span"].isna(), "bytes"].sum()),
        worst,
        missed and worst is None and len(reader.triples(step)) > 0,
        next(iter(inside(reader, step)), None) if missed else None,
    )


def _moved_bytes(reader: TraceReader, step: int, moved: pd.DataFrame) -> int | None:
    """Bytes that moved to the device at a step: of its copies, or, where single copies were not recorded, of the
    step."""
    if not reader.meta.lacks("transfer"):
        return int(moved["bytes"].sum())
    total = float(reader.steps().set_index("step")["h2d_bytes"].get(step, float("nan")))
    return None if math.isnan(total) else int(total)


def missed_most(reader: TraceReader, step: int, moved: pd.DataFrame | None = None) -> Missed | None:
    """Return what was missed at a step and comes first in the lens's order; None if nothing was missed by `LEAST_MASS`
    or `LEAST_EFFECT`. `moved`: the step's copies to the device, if they are at hand."""
    triples = ordered(reader, step)
    triples = triples[(triples["regret"] > 0) | (triples["unread"] > 0)]
    shares = triples[["regret", "unread"]].max(axis=1)
    triples = triples[(shares >= LEAST_MASS) | (triples["effect"] >= LEAST_EFFECT)]
    if triples.empty:
        return None
    worst = triples.iloc[0]
    layer, kv_head, span = int(worst["layer"]), int(worst["kv_head"]), int(worst["span"])
    if moved is None:
        moved = reader.transfers(step=step)
        moved = moved[moved["direction"] == "h2d"]
    row = reader.span(span)
    facts = Facts.gather(reader, step, layer, kv_head, span)
    effect = None if pd.isna(worst["effect"]) else float(worst["effect"])
    return Missed(
        layer,
        kv_head,
        _query_head(reader, step, layer, kv_head, span),
        span,
        row.kind,
        row.tok_start,
        row.tok_end,
        None if pd.isna(worst["reference"]) else float(worst["reference"]),
        float(worst["own"]),
        float(worst["mass"]),
        float(worst["regret"]),
        None if pd.isna(worst["unread"]) else float(worst["unread"]),
        facts.state,
        reason(facts),
        None if reader.meta.lacks("transfer") else int(moved.loc[moved["span"] == span, "bytes"].sum()),
        effect,
        None if effect is None else float(reader.effects(step)["lead"].iloc[0]),
        reader.meta.effect_steps,
    )


def _query_head(reader: TraceReader, step: int, layer: int, kv_head: int, span: int) -> int:
    heads = reader.oracle_step(step)
    heads = heads[(heads["layer"] == layer) & (heads["kv_head"] == kv_head) & (heads["span"] == span)]
    return int(heads["q_head"].iloc[int(heads["regret"].argmax())])
