"""What a method's paper says of it, as a comparison that can be made: arms that differ in what the statement is about,
and the figure that it is about. `kvlens bench claims` makes it: STATEMENTS of the method's part `claims`
(kvlens/lab/claims/methods), or `statements` on the class of a plugin. Plain data; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

NEEDLES = ("niah_single", "niah_multikey")
"""what answers are counted on where a statement names no task"""
ONE_NEEDLE = ("niah_single", "niah_noise")
"""where nothing else is of its kind"""
SHORT, LONG = (1024, 64), (64, 192)
"""tokens of context, and fed behind it, of a passage of real text: what is told apart by what a method does to the text
that is given, and to the text that it goes on with"""


@dataclass(frozen=True)
class Figure:
    """What two arms are compared by."""

    words: str
    """what it is, with its unit"""
    more_is_better: bool
    margin: float
    """ours: what *as good* and *alike* take for no difference"""
    of_text: bool = False
    """measured token by token of a real text, not on answers"""


FIGURES = {
    "exact": Figure("exact match", True, 0.1),
    "coverage": Figure("share of full attention's mass attended exactly", True, 0.05),
    "kl": Figure("KL to full KV in nats per token of real text", False, 0.05, of_text=True),
    "reused_share": Figure("share of the selected tokens that were still on the device", True, 0.05),
    "corrected_share": Figure("share of speculating (layer, KV head)s that waited for their recall", True, 0.05),
    "moved_share": Figure("bytes moved to the device per step, as a share of full KV", False, 0.05),
    "cold_share": Figure("bytes in host memory, as a share of full KV", False, 0.05),
}


@dataclass(frozen=True)
class Arm:
    """A method as a run of it would be at that budget (its usual preset, or `fit`), but for what is changed."""

    method: str
    budget: str = ""
    """share of full KV, of attended tokens for a method that keeps all KV; '': no limit"""
    changes: tuple[tuple[str, Any], ...] = ()


def arm(method: str, budget: str = "", /, **changes: Any) -> Arm:
    """An arm; changes: parameters by name."""
    return Arm(method, budget, tuple(changes.items()))


@dataclass(frozen=True)
class Statement:
    """One statement of a paper, and the arms that would show it.

    *better*: `first` is better than each of `others`. *as good*: it is not worse than any by the figure's margin.
    *alike*: neither worse nor better by it. *within*: the mean of `first` lies in `bounds`, and there are no `others`.
    `beside` are measured as well and shown with the verdict, which does not hang on them: what tells why.
    """

    source: str
    """where the paper says it: 'NAME sec. 5.2'"""
    says: str
    """the statement in our words, one sentence"""
    first: Arm
    others: tuple[Arm, ...] = ()
    verdict: Literal["better", "as good", "alike", "within"] = "better"
    figure: str = "exact"
    """a name of FIGURES"""
    tasks: tuple[str, ...] = NEEDLES
    question: Literal["in", "after"] = "in"
    text: tuple[int, int] = SHORT
    """of a figure of text: tokens of context and fed"""
    beside: tuple[Arm, ...] = ()
    bounds: tuple[float, float] | None = None
    """smallest and largest value of the figure in the paper, of a statement that is *within*"""

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All that is measured for it."""
        return self.first, *self.others, *self.beside


def list_statements(method: type) -> tuple[Statement, ...]:
    """The statements of the own paper of a method's class: what it is derived from has others."""
    statements: tuple[Statement, ...] = vars(method).get("statements", ())
    return statements
