"""What a task is: a prompt with a known answer, and a score in 0..1 of what a model said to it. Generated, or read from
a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from kvlens.refusal import Refusal
from kvlens.text.prompts import PromptText
from kvlens.text.segments import Segment

CUE = " Answer:"
"""ends a question of a text that is simply continued"""


class Unscored(Refusal):
    """A task is known, and what would score it is not installed; one sentence."""


MOST_LENGTH = 1 << 20
"""tokens of a generated prompt"""
Encode = Callable[[str], list[int]]
"""text -> token ids without special tokens"""


@dataclass(frozen=True)
class TaskPrompt:
    """One prompt of a task (without special tokens), what is expected of it, and where the asked facts stand in its
    text."""

    text: str
    answer: str
    """the expected continuation, as people read it"""
    needle: tuple[tuple[int, int], ...]
    """character ranges [start, end) of the asked facts; empty where a file does not say"""
    task: str
    length: int | None
    """tokens asked for; None: as long as the file's text"""
    depth: float | None
    """place of the (first) asked fact, 0 = start; None: not placed"""
    seed: int
    index: int = 0
    answers: tuple[str, ...] = ()
    """what the metric compares with, where that is more than `answer`"""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """what else the metric needs, such as the classes of a classification"""
    opening: str = ""
    """how a model that answers in the chat form is helped to begin (RULER's answer_prefix), in place of CUE"""
    question: int | None = None
    """the character of `text` with which the question begins, and everything else that follows the context; None: it
    is not known apart"""
    cue: str = CUE
    """the end of a text that is simply continued, left out in the chat form"""
    segments: tuple[Segment, ...] = ()
    """named parts of the text, in characters; none reaches into the cue"""


@dataclass(frozen=True)
class Generation:
    """How a prompt of a task is answered: at most so many tokens, and how they are drawn (temperature 0: greedy)."""

    new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Task(ABC):
    """A family of prompts. Stateless; everything drawn comes from the seed (generated) or the index (files)."""

    name: str
    title: str
    summary: str
    metric: str
    """how an output is scored, and whose metric it is"""
    new_tokens: int
    """generated at most"""
    demo_language: ClassVar[bool] = False
    """whether it is in the language that the embedded demo model was trained on; it has learnt nothing else"""
    placed: bool = True
    """whether `depth` says where the asked fact stands"""
    items: int | None = None
    """prompts of a file; None: generated, as many as there are seeds"""

    @abstractmethod
    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> TaskPrompt:
        """A prompt of `length` tokens in all, `special` of which the tokenizer adds. Raises ValueError with one
        sentence."""

    def generation(self, index: int = 0) -> Generation:
        """How prompt `index` is answered."""
        return Generation(self.new_tokens)

    @abstractmethod
    def score(self, answer: str, output: str) -> float:
        """0..1, from the answer's text alone, as a stored run keeps it."""

    def grade(self, request: TaskPrompt, output: str) -> float:
        """0..1; like `score`, with all that is known of the prompt."""
        return self.score(request.answer, output)


@dataclass(frozen=True)
class Encoding:
    """How a model's prompts are counted. special: tokens around a text, the tokenizer's own or the chat form's."""

    encode: Encode
    special: int = 1
    chat: bool = False
    """questions are put in the chat form"""


def check_place(name: str, length: int | None, depth: float | None) -> tuple[int, float]:
    """(length, depth) of a generated prompt. Raises ValueError with one sentence."""
    if length is None or length < 1:
        raise ValueError(f"a {name} prompt needs a length in tokens, not {length}")
    if depth is None or not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth must lie between 0 and 1, not {depth}")
    return length, depth


def ask(
    task: Task, length: int | None, depth: float | None, seed: int, encoding: Encoding, index: int = 0
) -> TaskPrompt:
    """A prompt of a task in the form it will be fed in: `length` tokens in all, with the chat form's and the opening's.

    Raises ValueError with one sentence; Refusal `too_long` for more than MOST_LENGTH tokens."""
    if length is not None and length > MOST_LENGTH:
        sentence = f"a generated prompt has at most {MOST_LENGTH:,} tokens, not {length:,}: ask for a shorter one."
        raise Refusal(sentence, code="too_long", tokens=length, most=MOST_LENGTH)
    prompt = task.make(length, depth, seed, encoding.encode, encoding.special, index)
    if not encoding.chat:
        return replace(prompt, opening="")
    cue, tokens_before = prompt.cue if prompt.text.endswith(prompt.cue) else "", len(encoding.encode(prompt.text))
    more = len(encoding.encode(prompt.opening)) - (tokens_before - len(encoding.encode(prompt.text.removesuffix(cue))))
    if length is not None and more != 0:
        prompt = task.make(length, depth, seed, encoding.encode, encoding.special + more, index)
    return replace(prompt, text=prompt.text.removesuffix(cue))


def prompt_of(prompt: TaskPrompt) -> PromptText:
    """What is tokenized, and stored with a run."""
    needle = tuple(prompt.needle)
    return PromptText(
        prompt.text,
        prompt.answer,
        needle,
        prompt.task,
        prompt.seed,
        prompt.opening,
        prompt.question,
        segments=prompt.segments,
    )
