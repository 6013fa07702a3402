"""The demo model's own tasks, in the language it was trained on (kvlens.demo.tasks). It can do these and no others."""

from __future__ import annotations

from kvlens.demo.tasks import make_prompt, score
from kvlens.tasks.base import Encode, Task, TaskPrompt, check_place


class DemoTask(Task):
    """A task of the demo language. Prompts have at most the wanted number of tokens and come close to it."""

    metric = "exact match of the first line; of a list the share of its entries that are right (ours)"
    demo_language = True

    def __init__(self, name: str, new_tokens: int, summary: str) -> None:
        self.name, self.title, self.new_tokens, self.summary = name, name, new_tokens, summary

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> TaskPrompt:
        tokens, place = check_place(self.name, length, depth)
        result = make_prompt(self.name, tokens, place, seed, encode)
        question, answers = result.text.rindex("\nQuestion:"), (result.answer,)
        return TaskPrompt(
            result.text, result.answer, result.needle, self.name, tokens, place, seed, index, answers, question=question
        )

    def score(self, answer: str, output: str) -> float:
        return score(self.name, answer, output)


NEEDLE = DemoTask("needle", 12, "one fact hidden in filler, asked for at the end")
MULTIKEY = DemoTask("multikey", 12, "the asked fact among others of its kind")
CHAIN = DemoTask("chain", 80, "facts that must be followed one after the other")
NOTE = DemoTask("note", 48, "a longer note to recite")
LIST = DemoTask("list", 110, "several facts to gather")
