"""Which instructions of a prompt a run followed, beside full KV's own run."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens import tasks
from kvlens.meta import RunMeta
from kvlens.tasks.instructions import Instructions, followed


@dataclass(frozen=True)
class Followed:
    """One instruction of a task of instructions."""

    name: str
    run: bool
    """the run's output follows it"""
    full: bool | None
    """full KV's own run follows it; None: the run was not compared with full KV"""

    @property
    def sentence(self) -> str:
        """Say it of both runs."""
        verb = "followed" if self.run else "not followed"
        words = {True: "full KV follows it", False: "full KV does not follow it either", None: "full KV was not run"}
        full = "full KV does not follow it" if self.run and self.full is False else words[self.full]
        return f"The instruction '{self.name}' was {verb}; {full}."


def followed_instructions(meta: RunMeta) -> list[Followed]:
    """Return each instruction of the run's prompt, the right number first; [] of a run of another task."""
    try:
        task = tasks.get(meta.task) if meta.task else None
    except ValueError:
        return []  # a task of a plugin or of a file that is not here
    if not isinstance(task, Instructions) or meta.answer is None or meta.output_text is None:
        return []
    scores = followed(meta.answer, meta.output_text)
    full = None if meta.reference_output is None else followed(meta.answer, meta.reference_output)
    return [Followed(name, score, None if full is None else full[name]) for name, score in scores.items()]
