"""The prompts of trials, and the chat form in which each model is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvlens import methods, tasks
from kvlens.engine.engine import Engine
from kvlens.engine.prefill import ReadPrompt
from kvlens.methods.base import Method
from kvlens.tasks import TaskPrompt
from kvlens.tasks.encoding import encoding_of
from kvlens.text.prompts import Prompt, tokenize

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Trial:
    """What is run: prompt `index` of a task under a method. `budget` is a share of full KV, '' = no limit. Of a prompt
    that is read from a file, length and depth are None and index is its place in the file."""

    task: str
    length: int | None
    depth: float | None
    seed: int
    index: int
    method: str
    budget: str
    question: str = "in"
    """in: read and placed with its context; after: fed once the context was placed"""
    dtype: str = ""
    """number format, where it is not the table's own: the noise floor"""

    @property
    def prompt(self) -> tuple[str, int | None, float | None, int, int, str]:
        """What its prompt is made from."""
        return self.task, self.length, self.depth, self.seed, self.index, self.question


class Prompts:
    """Prompts in the model's own tokens, each made and read once for all trials that follow on it."""

    def __init__(self, engine: Engine, first_seed: int = 0, names: Sequence[str] = ()) -> None:
        """names: methods that will be asked for, so that the first reading serves them all."""
        self.engine, self.first_seed = engine, first_seed
        self._methods = [methods.get(name) for name in names]
        self._encoding = encoding_of(engine.loaded.tokenizer)
        self._key: tuple[Any, ...] | None = None
        self._asked: TaskPrompt | None = None
        self._prompt: Prompt | None = None
        self._read: ReadPrompt | None = None

    def __call__(self, task: str, length: int, index: int) -> tuple[TaskPrompt, Prompt, ReadPrompt]:
        """Prompt `index` of the quality table, whose depth goes round with the index."""
        trial = Trial(task, length, DEPTHS[index % len(DEPTHS)], self.first_seed + index, index, "", "")
        return self.asked(trial), self.prompt(trial), self.read(trial)

    def asked(self, trial: Trial) -> TaskPrompt:
        """The trial's prompt as text. Raises ValueError with one sentence."""
        if self._asked is None or self._key != trial.prompt:
            self._prompt = None
            self._asked = tasks.remake(asdict(trial), self._encoding)
            self._key = trial.prompt
        return self._asked

    def prompt(self, trial: Trial) -> Prompt:
        """In tokens. Raises BadPrompt when the model cannot take it."""
        prompt_text = self.asked(trial)
        if self._prompt is None:
            loaded, new = self.engine.loaded, tasks.get(trial.task).generation(trial.index).new_tokens
            self._prompt = tokenize(
                tasks.prompt_of(prompt_text), loaded.tokenizer, loaded.max_positions, new, question=trial.question
            )
        return self._prompt

    def read(self, trial: Trial, method: type[Method] = Method) -> ReadPrompt:
        """Prefilled, with all that `method` asks to see of it. Prompts that follow one another and are the same tokens,
        such as the context of several questions that are fed after it, are read once."""
        prompt = self.prompt(trial)
        if self._read is None or self._read.ids != prompt.ids or not self._read.serves(method):
            self._read = None  # two readings at a time are not held
            asking = (*self._methods, method)
            queries = max(128, *(method.needs.queries for method in asking))
            self._read = self.engine.read(
                prompt, queries=queries, received=any(method.needs.received for method in asking)
            )
        return self._read
