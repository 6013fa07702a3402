"""Instructions that must survive: a prompt asks for a number and for the form of the answer, and each instruction is
scored by itself.

After arXiv 2510.00231, The Pitfalls of KV Cache Compression: a system prompt holds several instructions, and eviction
loses some of them while the answer stays right. Sentences, forms and the demonstrations behind an instruction are ours:
SmolLM2-135M follows no form that is only described.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvlens.tasks import words
from kvlens.tasks.base import Encode, TaskPrompt
from kvlens.tasks.generated import Generated
from kvlens.tasks.layout import HEAD, Content
from kvlens.tasks.needles import fact
from kvlens.text.segments import Segment

INSTRUCTION, DOCUMENTS, ANSWER = "instruction", "documents", "answer"
EXAMPLES = (
    ("What is the capital of France?", "Paris"),
    ("How many days are in a week?", "seven"),
    ("Which colour is snow?", "white"),
)


@dataclass(frozen=True)
class Rule:
    """An instruction about the form of the answer."""

    name: str
    sentence: str
    prefix: str = ""
    suffix: str = ""

    def apply(self, answer: str) -> str:
        """Return the answer in this form."""
        return f"{self.prefix}{answer}{self.suffix}"

    def is_kept(self, number: str, output: str) -> bool:
        """Return True if the number is in this form in an output of one line; of an output with another answer, if it
        has the marks of the form."""
        head, separator, tail = output.partition(number)
        return self.prefix in head and self.suffix in (tail if separator else head)


BRACKETS = Rule("brackets", "Put the answer in square brackets.", "[", "]")
HASH = Rule("hash", "Write a hash sign in front of the answer.", "#")
RULES = (HASH, BRACKETS)


class Instructions(Generated):
    """One number in real prose is asked for, and a segment `instruction` says how to write it."""

    metric = "share of the instructions that the first line of the output follows, the right number being one (ours)"
    new_tokens = 24

    def __init__(self, name: str, title: str, summary: str, rules: tuple[Rule, ...], leads: bool) -> None:
        """rules: the innermost first; leads: the instruction is before the documents, else behind them."""
        self.name, self.title, self.summary = name, title, summary
        self.rules, self.leads = rules, leads

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        (person,), number = words.people(rng, 1), words.number(rng)
        order = instruction_text(self.rules)
        question = f"\n\nQuestion: What is the library card number of {person}? Answer:"
        head, tail = (f"{order}\n\n{HEAD}", question) if self.leads else (HEAD, f"\n\n{order}{question}")
        return Content([fact(person, number)], [depth], head=head, tail=tail, opening="Answer:"), [number]

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> TaskPrompt:
        prompt = super().make(length, depth, seed, encode, special, index)
        text, order = prompt.text, instruction_text(self.rules)
        start = text.index(order) if self.leads else text.rindex(order)
        question = text.rindex("\n\nQuestion:")
        documents = (start + len(order), question) if self.leads else (0, start)
        parts = Segment(INSTRUCTION, start, start + len(order)), Segment(DOCUMENTS, *documents)
        ordered = tuple(sorted(parts, key=lambda part: part.start))
        answer = f" {write(self.rules, prompt.answers[0])}"
        return replace(prompt, answer=answer, question=question, segments=ordered)

    def score(self, answer: str, output: str) -> float:
        scores = followed(answer, output)
        return sum(scores.values()) / len(scores)


def instruction_text(rules: tuple[Rule, ...]) -> str:
    """Return the instruction with its demonstrations."""
    shown = "".join(f"\nQuestion: {question}\nAnswer: {write(rules, answer)}" for question, answer in EXAMPLES)
    return f"Instruction: {' '.join(rule.sentence for rule in rules)} For example:{shown}"


def write(rules: tuple[Rule, ...], answer: str) -> str:
    """Return an answer in the form of all rules."""
    for rule in rules:
        answer = rule.apply(answer)
    return answer


def followed(answer: str, output: str) -> Mapping[str, bool]:
    """Return whether an output follows each instruction, by its name, and has the number (`answer`). answer: the
    expected one, in the form that the instructions ask for."""
    number = "".join(letter for letter in answer if letter.isdigit())
    line = output.strip().partition("\n")[0]
    rules = [rule for rule in RULES if rule.prefix in answer and rule.suffix in answer]
    return {ANSWER: number in line, **{rule.name: rule.is_kept(number, line) for rule in rules}}


FIRST = Instructions(
    "instruction_first", "instruction before", "a form of the answer, said before the text", (BRACKETS,), True
)
LAST = Instructions(
    "instruction_last", "instruction behind", "a form of the answer, said behind the text", (BRACKETS,), False
)
SEVERAL = Instructions(
    "instructions", "several instructions", "two forms of one answer, said before the text", (HASH, BRACKETS), True
)
