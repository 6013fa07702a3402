"""What FreeKV's claims are measured on, by model: the toy in its own language, any other model on real prose."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.models.find import DEMO


@dataclass(frozen=True)
class Case:
    """Prompts, and what every arm is fed on them."""

    model: str
    """as sentences call it"""
    tasks: tuple[str, ...]
    pooled: tuple[str, ...]
    """of them, those on which the six poolings are compared"""
    length: int
    """tokens of a prompt"""
    first_seed: int
    own_words: int
    """full KV's own tokens are fed: up to where they are the right answer, else so many at most; 0: the key's tokens.
    A model that answers in sentences of its own is asked at no step for a token that it would not say"""
    taus: tuple[float, ...] = (0.0, 0.7, 0.8, 0.9, 1.0)
    """thresholds of correction; 0, 0.8, 0.9 and 1 among them"""
    wider: str = ""
    """another share of full KV, at which Table 7 is asked again, so that what the budget costs is told from what
    speculation costs; '': it is not"""
    turning: str = ""
    """what is known of why this model's queries turn, a sentence"""

    @property
    def fed(self) -> str:
        """What the arms read, in words."""
        return "full KV's own words" if self.own_words else "the right answer"

    def about(self, prompts: int) -> str:
        """What a claim was measured on, in words; `prompts` of each task."""
        return (
            f"{self.model}, {prompts} prompts of each of {', '.join(self.tasks)}, {self.length} tokens, {self.fed} fed "
            "token by token"
        )


TOY_TASKS = ("multikey", "chain", "note", "list")
TOY = Case(
    "the demo model",
    TOY_TASKS,
    TOY_TASKS,
    2048,
    6_800_000,
    0,
    turning="In the demo model it is the heads that retrieve (layer 2) whose queries turn most.",
)
PROSE = ("niah_single", "niah_multikey", "niah_identifier")
"""those that SmolLM2 answers with full KV, one of them with a long answer; the poolings are compared where every prompt
is answered"""


def case_of(model: str) -> Case:
    """The case of a model, by the name it is loaded under."""
    if model == DEMO:
        return TOY
    return Case(model, PROSE, PROSE[:1], 1024, 6_810_000, own_words=40, taus=(0.0, 0.8, 0.9, 1.0), wider="40%")
