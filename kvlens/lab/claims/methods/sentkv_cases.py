"""What SentKVCompress's claims are measured on, by model: the toy in its own language, any other model on real
prose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlens.models.find import DEMO

ABLATIONS: dict[str, dict[str, Any]] = {
    "punctuation and length": {},
    "without punctuation": {"marks": "none"},
    "without length control": {"length_control": False},
    "without punctuation selection": {"marks": "any"},
}
"""the paper's figure 8 (a); the last one: every punctuation token, all with the same weight"""
EXACT, MORE = "every token ranked by its own key", "usage 0.2"
CAUSES: dict[str, dict[str, Any]] = {EXACT: {"length": 1, "deviation": 1, "marks": "none"}, MORE: {"usage": 0.2}}
"""what tells a bad ranking from too few tokens, where answers are lost: a chunk of one token has its key as bound"""


@dataclass(frozen=True)
class Case:
    """Prompts, and how answers are counted on them."""

    model: str
    """as sentences call it"""
    tasks: tuple[str, ...]
    length: int
    """tokens of a prompt"""
    first_seed: int
    feeds_key: bool
    """the key is fed token by token, and right is what would have been said; else every arm decodes by itself, and
    right is the task's score. A model that answers in sentences of its own has no key to be fed"""
    causes: tuple[str, ...] = ()
    """tasks on which the arms CAUSES are run"""
    sentences: str = ""
    """what is known of the sentences of its language that bears on the ablations"""

    def arms(self, task: str) -> Mapping[str, dict[str, Any]]:
        """Name of an arm -> what differs from the paper's parameters."""
        return ABLATIONS | (CAUSES if task in self.causes else {})

    @property
    def counted(self) -> str:
        """How answers are counted, in words."""
        return "the right answer fed token by token" if self.feeds_key else "each decodes by itself"

    def about(self, prompts: int) -> str:
        """What a claim was measured on, in words; `prompts` in all."""
        return (
            f"{self.model}, n = {prompts} prompts of {self.length} tokens ({', '.join(self.tasks)}), preset paper, "
            f"{self.counted}"
        )


TOY = Case(
    "the demo model",
    ("multikey", "chain", "note"),
    2048,
    6_700_000,
    True,
    sentences="Of the demo language's sentences 99 % have 9 to 16 tokens, so cutting at every mark gives nearly the "
    "same chunks as cutting near 14 tokens; real text is less even.",
)
PROSE = ("niah_single", "niah_multikey", "niah_identifier")
"""those that SmolLM2 answers with full KV, one of them with a long answer"""


def case_of(model: str) -> Case:
    """The case of a model, by the name it is loaded under."""
    return TOY if model == DEMO else Case(model, PROSE, 1024, 6_710_000, False, PROSE[1:2])
