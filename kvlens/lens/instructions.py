"""Which instructions of a prompt a run followed, beside full KV's own run."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens import methods, tasks
from kvlens.meta import RunMeta
from kvlens.tasks.instructions import Instructions, followed


@dataclass(frozen=True)
class Followed:
    """One instruction of a task of instructions."""

    name: str
    run: bool
    """the run's output follows it"""
    full: bool | None
    """full KV's own run follows it; None: the run was not compared with full KV, or is full KV's own"""
    reference: bool = False
    """the run is full KV's own"""

    @property
    def sentence(self) -> str:
        """Say it of both runs."""
        verb = "followed" if self.run else "not followed"
        if self.reference:
            return f"The instruction '{self.name}' was {verb}."
        words = {
            True: "full KV follows it",
            False: "full KV does not follow it either",
            None: "not compared with full KV",
        }
        full = "full KV does not follow it" if self.run and self.full is False else words[self.full]
        return f"The instruction '{self.name}' was {verb}; {full}."


def followed_instructions(meta: RunMeta) -> list[Followed]:
    """Return each instruction of the run's prompt, the right number first; [] of a run of another task, and of a run
    that was fed its tokens."""
    try:
        task = tasks.get(meta.task) if meta.task else None
    except ValueError:
        return []  # a task of a plugin or of a file that is not here
    if not isinstance(task, Instructions) or meta.answer is None or meta.output_text is None or meta.forced:
        return []
    scores = followed(meta.answer, meta.output_text)
    full = {} if meta.reference_output is None else followed(meta.answer, meta.reference_output)
    is_reference = meta.method == methods.REFERENCE
    return [Followed(name, score, full.get(name), is_reference) for name, score in scores.items()]
