"""How much a first step of loss took: the answer, or only words on the way to a right one, a stop, a near tie. And what
came of a run, in a few words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from kvlens.lens.answers import is_cut_off, is_expected, is_right
from kvlens.lens.verdict import LEAST_EFFECT, LEAST_MASS, Verdict
from kvlens.store.outcomefacts import LossFacts, OutcomeFacts
from kvlens.store.reader import TraceReader
from kvlens.text.answerwords import answer_words

NEAR_TIE = 0.5
"""difference of two logits below which the choice between their tokens is called a near tie: the less probable one is
at least 0.6 times as probable"""
SHOWN = 60
"""characters of full KV's output that a sentence says, at most"""


@dataclass(frozen=True)
class Severity:
    """What is known of a step of loss beyond that its token is another."""

    right: bool | None
    """the output is the expected answer; None: no answer is known, or the method did not choose the tokens"""
    full_right: bool | None
    """full KV's output is; None: no answer is known, or the output was not recorded"""
    full_said: str | None
    """full KV's output; None: not recorded"""
    stop: bool
    """one of the two tokens ends the output"""
    margin: float | None
    """logit of the method's token minus that of full KV's, under the method, >= 0; None: not recorded (the method's
    choice was not followed, or was drawn by chance)"""
    cut_off: bool = False
    """the output is not the expected answer and ended at the limit of new tokens"""

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and self.margin < NEAR_TIE

    @property
    def both_wrong(self) -> bool:
        """The answer is wrong and so is full KV's: there was none to lose."""
        return self.right is False and self.full_right is False

    @property
    def mild(self) -> bool:
        """Nothing that was asked for is known to be lost."""
        return self.right is True or self.both_wrong or (self.right is None and (self.stop or self.near_tie))

    @property
    def word(self) -> str:
        """What such a step is called."""
        return "Diverged" if self.mild else "Lost"

    def headline(self, step: int) -> str:
        """How the verdict begins."""
        return f"{self.word} at step {step}"

    def words(self) -> str:
        """In a table: 'wrong answer', 'right answer, near tie', 'wrong answer, cut off, full KV's too'."""
        answer = answer_words(self.right, self.cut_off)
        answer += ", full KV's too" if self.both_wrong else ""
        where = "at the stop token" if self.stop else "near tie" if self.near_tie else ""
        if not answer:
            return f"other token, {where}" if where else "other token"
        return f"{answer}, {where}" if where and self.mild else answer

    def sentence(self) -> str:
        """What it comes to; '' where nothing more is known."""
        sentence = {True: "the answer is right anyway", False: "the answer is wrong", None: ""}[self.right]
        if self.cut_off:
            sentence += ", cut off by the limit of new tokens"
        if self.both_wrong:
            sentence += f", and so is full KV's ({_short(self.full_said or '')})"
        parts = [sentence] if sentence else []
        if self.stop:
            parts.append("one of the two tokens ends the output")
        if self.near_tie:
            parts.append(
                f"near tie: this run's token leads full KV's by {self.margin:.2g} logits, less than {NEAR_TIE}"
            )
        return "; ".join(parts)


def unmissed_words(loss_verdict: Verdict, cost: Severity) -> str:
    """Return why a verdict names no span: 'near tie, nothing missed: ...', 'nothing missed: ...' or 'not recorded'."""
    if not loss_verdict.nothing_missed:
        return "not recorded"
    tie = "near tie, " if cost.near_tie else ""
    return (
        f"{tie}nothing missed: no span lost {LEAST_MASS:.1%} of a KV head's attention or moved the choice by "
        f"{LEAST_EFFECT:g} logits"
    )


def severity(reader: TraceReader, loss_verdict: Verdict) -> Severity:
    """Return how much the step of loss took, from recorded columns alone."""
    facts = reader.outcome_facts()
    assert facts.loss is not None
    assert facts.loss.step == loss_verdict.step
    return _severity(facts, facts.loss)


def _severity(facts: OutcomeFacts, loss: LossFacts) -> Severity:
    pair, margin = (loss.ref_token, loss.top_token), None
    followed = loss.token == loss.top_token and not facts.temperature
    if followed and loss.token_logprob is not None and loss.ref_top_logprob is not None:
        difference = loss.token_logprob - loss.ref_top_logprob
        margin = difference if difference >= 0 else None
    stop = any(token in facts.stop_ids for token in pair)
    reference = facts.reference_output
    return Severity(is_right(facts), is_expected(facts, reference), reference, stop, margin, is_cut_off(facts))


def _short(text: str) -> str:
    """The first line of an output in quotation marks, what is unseen in it named."""
    line = text.strip().partition("\n")[0]
    return repr(line if len(line) <= SHOWN else f"{line[:SHOWN]}…")


KINDS = {
    "right": "right answer",
    "wrong": "wrong answer",
    "cut_off": "wrong answer that the limit of new tokens cut off",
    "lost": "left full KV and lost what was asked for",
    "diverged": "left full KV at no known cost",
    "kept": "never left full KV",
    "unsound": "failed a self-check: its figures cannot be trusted",
    "unknown": "nothing is known",
}
"""what came of a run, as lists of runs are asked for it; several may be true of one"""
KL_THERE = "KL(full KV || method) at the step that left full KV, in nats"
MARGIN_THERE = (
    f"logit of the method's token above that of full KV's at the step that left full KV, under the method; below "
    f"{NEAR_TIE} it is a near tie"
)
"""what two columns of tables say, on hover"""


@dataclass(frozen=True)
class Outcome:
    """What came of a run. None: not recorded, or there is none."""

    words: str
    """'right answer', 'wrong answer', 'nothing lost'; '' where nothing is known"""
    expected: str | None = None
    lost_at: int | None = None
    """the first step whose most probable token is not full KV's"""
    kl: float | None = None
    """KL(full || method) there, nats"""
    kinds: tuple[str, ...] = ("unknown",)
    """of KINDS, what is true of it"""
    margin: float | None = None
    """there, by how much the logit of the method's token is above that of full KV's, under the method"""
    stop: bool | None = None
    """there, one of the two tokens ends the output"""

    @property
    def right(self) -> bool | None:
        """Whether the output is the expected answer; None: not known."""
        return True if "right" in self.kinds else False if "wrong" in self.kinds else None

    def columns(self) -> dict[str, Any]:
        """As every export of a run says it (docs/trace-schema.md, What came of a run); None: not recorded, or there is
        none."""
        return {
            "outcome": self.words or None,
            "outcome_kinds": list(self.kinds),
            "expected": self.expected,
            "left_full_kv_at_step": self.lost_at,
            "kl_at_loss_nats": self.kl,
            "margin_logits": self.margin,
            "at_stop_token": self.stop,
        }


def failed_checks(reader: TraceReader) -> list[str]:
    """Return the names of the self-checks that a run failed, in their order."""
    checks = reader.self_checks()
    return [str(name) for name in checks.loc[~checks["passed"].astype(bool), "name"]]


def outcome(reader: TraceReader) -> Outcome:
    """From recorded columns; what was missed is not asked, so it is quick. A run that failed a self-check has no other
    outcome: no list counts it as right or wrong."""
    return outcome_of(reader.outcome_facts())


def outcome_of(facts: OutcomeFacts) -> Outcome:
    """Return the outcome of a run by its recorded facts, as `outcome` does."""
    expected = facts.answer
    if facts.failed:
        return Outcome("self-check failed", expected, kinds=("unsound",))
    answer, loss = is_right(facts), facts.loss
    cut_off = is_cut_off(facts)
    answered = {True: ("right",), False: ("wrong", "cut_off") if cut_off else ("wrong",), None: ()}[answer]
    if loss is not None:
        cost = _severity(facts, loss)
        kinds = (*answered, "diverged" if cost.mild else "lost")
        return Outcome(cost.words(), expected, loss.step, loss.kl, kinds, cost.margin, cost.stop)
    kinds = (*answered, "kept") if facts.compared else answered or ("unknown",)
    if answer is None:
        return Outcome("nothing lost" if facts.compared else "", expected, kinds=kinds)
    words = answer_words(answer, cut_off)
    if not answer and facts.compared:
        words += ", as full KV"
    return Outcome(words, expected, kinds=kinds)


_COLUMNS = pa.schema(
    [
        *((name, pa.string()) for name in ("uid", "what_if", "outcome", "outcome_kinds", "expected")),
        ("left_full_kv_at_step", pa.int64()),
        ("kl_at_loss_nats", pa.float64()),
        ("margin_logits", pa.float64()),
        ("at_stop_token", pa.bool_()),
    ]
)


def outcome_table(reader: TraceReader) -> pa.Table:
    """What came of a run as the one row of an export; what stands in lists stands in one text, by spaces."""
    came, meta = outcome(reader).columns(), reader.meta
    changes = [name for name, change in (("hold", meta.hold), ("drop", meta.drop), ("changed", meta.changed)) if change]
    kinds = " ".join(came["outcome_kinds"])
    row = {"uid": reader.uid, "what_if": " ".join(changes) or None, **came, "outcome_kinds": kinds}
    return pa.Table.from_pylist([row], schema=_COLUMNS)
