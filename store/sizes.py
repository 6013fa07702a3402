"""The sizes of a run that limit the numbers in its tables."""

from __future__ import annotations

from dataclasses import dataclass

BETWEEN_STEPS = ("transfer", "event", "journal", "cut", "decision")
"""tables with rows of step -1, the end of prefill"""


@dataclass(frozen=True)
class Sizes:
    """What ids are checked against."""

    steps: int
    layers: int
    q_heads: int
    kv_heads: int
    prompt: int
    """tokens of the prompt"""
    positions: int
    """tokens of the prompt and of the steps"""
    spans: int
    """ids below it are spans; where ids have gaps, `integrity` looks for each"""

    def limits(self, table: str) -> dict[str, tuple[int, int]]:
        """Column -> smallest and largest id."""
        last = self.steps - 1
        return {
            "step": (-1 if table in BETWEEN_STEPS else 0, last),
            "born_step": (-1, last),
            "died_step": (-1, self.steps),
            "last_step": (-1, last),
            "layer": (0, self.layers - 1),
            "q_head": (0, self.q_heads - 1),
            "kv_head": (0, self.kv_heads - 1),
            "n_steps": (0, self.steps),
            "pos": (0, self.positions - 1),
            "lost_pos": (0, self.positions - 1),
            "reference_lost_pos": (0, self.positions - 1),
            "tok_end": (0, self.positions),
            **dict.fromkeys(("span", "refused_span", "missed_span"), (0, self.spans - 1)),
        }

    def whole(self) -> dict[str, int]:
        """Table -> rows of a run whose every step, layer and head has one."""
        return {
            "step": self.steps,
            "token": self.prompt + self.steps,
            "head_step": self.steps * self.layers * self.q_heads,
            "kv_step": self.steps * self.layers * self.kv_heads,
            "head_run": self.layers * self.q_heads,
            "kv_run": self.layers * self.kv_heads,
            "layer_step": self.steps * self.layers,
        }
