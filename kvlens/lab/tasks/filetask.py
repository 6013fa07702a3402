"""Tasks that are read from a file the user has on disk, every row of which is checked before anything is run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kvlens.lab.tasks.filerows import Rows, read_rows, unpacked
from kvlens.refusal import Refusal
from kvlens.tasks.base import CUE, Encode, Task, TaskPrompt
from kvlens.text.units import counted


@dataclass(frozen=True)
class Posed:
    """One prompt of a file before it is cut: `context`, and what follows it, where that is known apart."""

    context: str
    answers: tuple[str, ...]
    """what the metric compares with; the first is the expected output as people read it"""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """what else the metric needs"""
    question: str = ""
    cue: str = CUE
    """the end of the question that the chat form leaves out"""
    opening: str = ""
    """how the answer is begun in the chat form"""
    together: tuple[str, ...] = ()
    """the questions on the same context: it is cut so that the longest of them fits, and stays the same for all"""


class FileTask(Task):
    """The prompts of one file in order; `index` names one. A prompt is as long as its text, or its context is cut in
    its middle to `length` tokens in all, as LongBench and InfiniteBench cut: what stands at the beginning and at the
    end is kept."""

    placed = False
    fields: Mapping[str, type]
    """fields every row must have, with their types"""
    parameters: ClassVar[Mapping[str, int | str]] = {}
    """what can be set behind the path (KIND:PATH@NAME=VALUE), with its default"""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = self.title = self.stem = unpacked(path).stem
        self.unit, self.lines = self.read()
        """how a row is named to people, and (its number, its fields)"""
        self.items: int = len(self.lines)
        for number, line in self.lines:
            self.check(number, line)

    def read(self) -> tuple[str, Rows]:
        """What people call a row, and the rows with their numbers. Raises ValueError with one sentence."""
        return read_rows(self.path, self.fields)

    def check(self, number: int, line: dict[str, Any]) -> None:
        """Raises ValueError, naming row and field, for a row that cannot be asked or scored."""

    @abstractmethod
    def ask(self, line: dict[str, Any]) -> Posed:
        """The prompt of a row."""

    def pose(self, index: int) -> Posed:
        """Prompt `index`: one of each row, unless a kind of file has it otherwise."""
        return self.ask(self.lines[index][1])

    @abstractmethod
    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        """Return the score of an output, 0..1."""

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> TaskPrompt:
        if not 0 <= index < self.items:
            raise Refusal(
                f"'{self.path.name}' has {counted(self.items, 'prompt')}; there is no number {index}.",
                code="no_such_prompt",
                prompts=self.items,
                index=index,
            )
        posed = self.pose(index)
        context = posed.context
        if length is not None:
            behind = max((posed.question, *posed.together), key=lambda question: len(encode(question)))
            context = cut_middle(context, length - special, encode, behind)
            if posed.context and not context:
                raise Refusal(
                    f"{length} tokens do not hold the question of prompt {index} of '{self.path.name}'.",
                    code="too_short",
                    tokens=length,
                    index=index,
                )
        return TaskPrompt(
            context + posed.question,
            " " + posed.answers[0],
            (),
            self.name,
            length,
            None,
            seed,
            index,
            posed.answers,
            posed.facts,
            posed.opening,
            len(context) if context and posed.question else None,
            posed.cue,
        )

    def score(self, answer: str, output: str) -> float:
        return self.measure(output, (answer.strip(),), {})

    def grade(self, request: TaskPrompt, output: str) -> float:
        return self.measure(output, request.answers, request.facts)

    def wrong(self, number: int, problem: str, code: str = "bad_row", **values: object) -> Refusal:
        """Return the error of a row, whose number is among its values."""
        sentence = f"{self.unit} {number} of '{self.path.name}' {problem}."
        return Refusal(sentence, code=code, row=number, **values)


def texts(values: list[Any]) -> tuple[str, ...]:
    """Numbers and strings of a list as strings."""
    return tuple(str(value) for value in values)


def cut_middle(text: str, tokens: int, encode: Encode, behind: str = "") -> str:
    """`text` without as much of its middle as brings it, with `behind` put behind it, to at most `tokens` tokens."""
    if len(encode(text + behind)) <= tokens:
        return text
    low, high = 0, len(text)
    while low < high:
        kept_tokens = (low + high + 1) // 2
        if len(encode(_ends(text, kept_tokens) + behind)) <= tokens:
            low = kept_tokens
        else:
            high = kept_tokens - 1
    return _ends(text, low)


def _ends(text: str, kept_count: int) -> str:
    return text[: kept_count - kept_count // 2] + (text[-(kept_count // 2) :] if kept_count > 1 else "")
