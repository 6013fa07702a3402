"""The prompt that a command is given: a file or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from kvlens.text.prompts import PromptText, checked, decode, read_prompt


def prompt_in(file: str) -> PromptText:
    """A checked prompt. file: a path, or - for standard input. Raises ValueError with one sentence."""
    if file == "-":
        return checked(decode(sys.stdin.buffer.read(), "standard input"), file)
    return read_prompt(Path(file))
