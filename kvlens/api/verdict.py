"""The verdict on a run as one object: a sentence, and the fields that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlens.store.reader import TraceReader

OUTCOMES = {
    "lost": "the run left full KV and lost what was asked for",
    "diverged": "the run left full KV at no known cost",
    "kept": "the run never left full KV",
    "not_compared": "the run was not compared with full KV",
}
"""what a verdict's `outcome` can be"""
EXCERPT = 40
"""characters of a span's text that the sentence quotes, at most"""


@dataclass(frozen=True, repr=False)
class Verdict:
    """What became of a run. `str(verdict)` is one sentence. A field is None where the run has no such thing, or where
    it was not recorded."""

    outcome: str
    """one of OUTCOMES"""
    right: bool | None = None
    """the output is the expected answer; None: no answer is known, or the run was fed its tokens"""
    step: int | None = None
    """first step whose most probable token is not full KV's"""
    expected: str | None = None
    """the token that full KV chose there"""
    got: str | None = None
    """the most probable token under the method there"""
    kl_nats: float | None = None
    """KL(full KV || method) there"""
    layer: int | None = None
    """of the KV head that missed most"""
    kv_head: int | None = None
    span: int | None = None
    """the span that it missed"""
    tok_start: int | None = None
    """first position of the span"""
    tok_end: int | None = None
    """position behind the span's last token"""
    text: str | None = None
    """the span's text"""
    reason: str | None = None
    """why the span was not attended exactly, one of kvlens.lens.reasons.KINDS"""
    why: str | None = None
    """the same as a sentence without its full stop"""
    reference_mass: float | None = None
    """full KV's own mass on the span at the step of loss, mean over the KV head's query heads, share 0..1; None: not
    recorded. About 0 where the effect is of later lost steps (`effect_steps`)"""
    own_query_mass: float | None = None
    """full attention's mass on the span by the run's own query, likewise"""
    mass: float | None = None
    """the method's mass on it"""
    effect_logits: float | None = None
    """what the span's absence took from the leads of full KV's tokens at the lost steps of the answer"""
    restored: bool | None = None
    """of a run that repeats another with something changed: the answer is back, or, where full KV's own answer is not
    known to be right, full KV's token at the lost step (`of_token`); None: nothing was lost before, or the run repeats
    none"""
    effect_steps: tuple[int, ...] = ()
    """the lost steps over which `effect_logits` is added; empty: the step of loss, or none was recorded"""
    of_token: bool = False
    """`restored` is of full KV's token, not of the answer"""
    cut_off: bool = False
    """the answer is wrong and ended at the limit of new tokens"""

    def __str__(self) -> str:
        if self.step is None:
            return f"{_capital(OUTCOMES[self.outcome])}{_answer(self.right, self.cut_off)}{self._restored()}."
        sentence = f"{_capital(self.outcome)} at step {self.step}: {self.got!r} in place of {self.expected!r}"
        if self.span is not None:
            where = f"span {self.span} (tokens {self.tok_start}-{(self.tok_end or 1) - 1}, {_excerpt(self.text or '')})"
            sentence += f", missed most by L{self.layer} KV{self.kv_head}: {where}; {self.why}"
        elif self.why:
            sentence += f", {self.why}"
        return f"{sentence}{_answer(self.right, self.cut_off)}{self._restored()}."

    def _restored(self) -> str:
        if self.restored is None:
            return ""
        target = "full KV's token at the lost step" if self.of_token else "it"
        return f"; the change {'restored' if self.restored else 'did not restore'} {target}"

    __repr__ = __str__


def read_verdict(reader: TraceReader) -> Verdict:
    """Return the verdict on a stored run, from recorded columns alone."""
    from kvlens.lens.answers import is_cut_off, right
    from kvlens.lens.severity import severity, unmissed_words
    from kvlens.lens.verdict import verdict

    loss, answer, cut_off = verdict(reader), right(reader), is_cut_off(reader.meta)
    change = reader.meta.whatif
    restored, of_token = (None, False) if change is None else (change.restored, not change.answer_known)
    if loss is None:
        compared = len(reader.loss()) > 0
        outcome = "kept" if compared else "not_compared"
        return Verdict(outcome, answer, restored=restored, of_token=of_token, cut_off=cut_off)
    cost = severity(reader, loss)
    outcome = "diverged" if cost.mild else "lost"
    why = unmissed_words(loss, cost) if loss.nothing_missed else None
    if (missed := loss.missed) is None:
        columns = outcome, answer, loss.step, loss.expected, loss.got, loss.kl
        return Verdict(*columns, why=why, restored=restored, of_token=of_token, cut_off=cut_off)
    texts = reader.tokens()["text"].tolist()
    return Verdict(
        outcome,
        answer,
        loss.step,
        loss.expected,
        loss.got,
        loss.kl,
        missed.layer,
        missed.kv_head,
        missed.span,
        missed.tok_start,
        missed.tok_end,
        "".join(texts[missed.tok_start : missed.tok_end]),
        missed.reason.kind,
        missed.reason.says,
        missed.reference,
        missed.own_query,
        missed.mass,
        missed.effect,
        restored,
        missed.effect_steps,
        of_token,
        cut_off,
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= EXCERPT else f"{line[: EXCERPT // 2]} ... {line[-EXCERPT // 2 :]}")


def _answer(right: bool | None, cut_off: bool) -> str:
    words = {True: "; the answer is right", False: "; the answer is wrong", None: ""}[right]
    return f"{words}, cut off by the limit of new tokens" if cut_off else words
