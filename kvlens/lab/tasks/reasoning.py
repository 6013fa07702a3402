"""What files of problems with one final answer have in common: how long a model may think, and several samples of it.

`@tokens=N`: tokens to generate at most. `@samples=K`: each problem K times, drawn at temperature 0.6 and top-p 0.95
(those DeepSeek-R1 is evaluated with, arXiv 2501.12948, section 3) with the seeds 0 to K - 1; the mean over all is
avg@K. One sample is greedy. The samples of a problem follow one another, and its prompt is read once for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from kvlens.lab.tasks.filetask import FileTask, Posed
from kvlens.tasks.base import Generation

TEMPERATURE, TOP_P = 0.6, 0.95
MOST_TOKENS, MOST_SAMPLES = 131_072, 64
BOXED = "Think step by step, and put the final answer in \\boxed{}."


class Reasoning(FileTask):
    """Problems of one file."""

    parameters: ClassVar[Mapping[str, int | str]] = {"tokens": 2048, "samples": 1}

    def __init__(self, path: Path, tokens: int | None = None, samples: int = 1) -> None:
        """tokens None: the kind's own."""
        self.new_tokens = int(self.parameters["tokens"]) if tokens is None else tokens
        self.samples = samples
        if not 1 <= self.new_tokens <= MOST_TOKENS:
            raise ValueError(f"the parameter 'tokens' lies between 1 and {MOST_TOKENS:,}, not {self.new_tokens:,}.")
        if not 1 <= samples <= MOST_SAMPLES:
            raise ValueError(f"the parameter 'samples' lies between 1 and {MOST_SAMPLES}, not {samples}.")
        super().__init__(path)
        self.items = len(self.lines) * samples

    def pose(self, index: int) -> Posed:
        return self.ask(self.lines[index // self.samples][1])

    def generation(self, index: int = 0) -> Generation:
        if self.samples == 1:
            return Generation(self.new_tokens)
        return Generation(self.new_tokens, TEMPERATURE, TOP_P, index % self.samples)

    def averaged(self, metric: str) -> str:
        """The metric as it is told."""
        return metric if self.samples == 1 else f"avg@{self.samples} of {metric}"


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} of a text whose braces match, pairs of braces inside it included; None where
    there is none. Braces behind a backslash are characters."""
    results, position = None, text.find("\\boxed")
    while position >= 0:
        start = position + len("\\boxed")
        start += len(text[start:]) - len(text[start:].lstrip(" "))
        end = _closing(text, start)
        if end is not None:
            results = text[start + 1 : end]
        position = text.find("\\boxed", start)
    return results


def _closing(text: str, start: int) -> int | None:
    """Where the brace that opens at `start` is closed."""
    if text[start : start + 1] != "{":
        return None
    depth, position = 0, start
    while position < len(text):
        if text[position] == "\\":
            position += 1
        elif text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if not depth:
                return position
        position += 1
    return None
