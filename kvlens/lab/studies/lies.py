"""The lies of plugin_lies.py: full KV with one hook that does not keep to its contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlens.methods.full import FullKV
from kvlens.methods.hooks import Needs

IN_PLACE, LATER, FIGURES, HIDES, ENDS, HANGS = (
    "changes its input",
    "changes its input later",
    "returns a wrong figure",
    "hides tensors",
    "ends the process",
    "hangs",
)
Way = Callable[[torch.Tensor], object]
GLOBAL_TENSORS: list[torch.Tensor] = []
"""a global variable of the module that the lying methods are of"""


@dataclass(frozen=True)
class Lie:
    """One lie: the hook that tells it, and what it does there."""

    kind: str
    words: str
    hook: str
    act: Callable[..., Any]
    """act(method, *arguments of the hook): returns what the hook returns if `answers`"""
    answers: bool = False
    needs: Needs = field(default_factory=lambda: Needs(queries=8))
    base: type[Any] = FullKV
    """the method that tells the truth otherwise"""
    keeps: bool = False
    """the method keeps the prompt that it was handed"""
    undo: Callable[[], None] = lambda: None

    def method(self) -> type[Any]:
        """Return the class that tells it."""
        lie = self

        class Liar(self.base):  # type: ignore[misc, name-defined]
            name = title = "liar"
            needs = lie.needs

            def prefill_end(self, prompt: Any) -> Any:
                placed = super().prefill_end(prompt)
                self.prompt, self.span_ids = (prompt if lie.keeps else None), placed[0].span_capacity
                return placed

        def hook(method: Any, *arguments: Any) -> Any:
            answer = lie.act(method, *arguments)
            return answer if lie.answers else getattr(super(Liar, method), lie.hook)(*arguments)

        if self.hook == "prefill_end":
            Liar.prefill_end = hook  # type: ignore[method-assign, assignment]
        else:
            setattr(Liar, self.hook, hook)
        return Liar

    def restore(self) -> None:
        """Take back what the lie did to anything but its run."""
        self.undo()
