"""A way to cut a prompt that a method offers to the Spans page, where a text is looked at through several methods, and
what a cut may depend on. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvlens.shape import KVShape

if TYPE_CHECKING:
    from kvlens.spans import Span


class RunSizes(Protocol):
    """What arithmetic about a run takes; a RunContext has it all."""

    @property
    def shape(self) -> KVShape: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def max_new(self) -> int: ...
    @property
    def budget_bytes(self) -> int | None: ...


class PromptFacts(RunSizes, Protocol):
    """What a cut of the prompt may depend on besides its surprisal; a RunContext has it all, and so has a stored
    run."""

    @property
    def model_name(self) -> str: ...
    @property
    def tokens(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Segmenter:
    """One kind of cut. Its spans are `Method.segments` of the method's parameters, unless `cut` says otherwise."""

    name: str
    """on the page: 'pages (TITLE)'"""
    shown: tuple[str, ...]
    """the parameters that decide where it cuts"""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """parameters that differ from the preset's"""
    cut: Callable[[Any, Sequence[Span]], list[Span]] | None = None
    """(parameters, spans of `Method.segments`) -> the spans of another level over them; None: these spans themselves"""
    alpha: str = ""
    """parameter by whose multiple of their deviation surprisals must exceed their mean at a boundary; '': none"""
    most_anchors: Callable[[Any, PromptFacts], int | None] | None = None
    """of a threshold's cut: (parameters, text) -> most boundary tokens that the budget allows; None: any number"""

    def serves(self, config: Mapping[str, Any]) -> bool:
        """Whether a run of the method with these parameters was cut so."""
        return self.cut is None and all(config.get(name) == value for name, value in self.changes.items())
