"""The prompt on which a model is checked against transformers' own generate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine
    from kvlens.text.prompts import Prompt


SENTENCE = "Item {number} of the list is in room {room}, and its colour is {colour}. "


COLOURS = ("red", "green", "blue", "white", "black")


def check_prompt(engine: Engine, tokens: int) -> Prompt:
    """A prompt of plain sentences, cut to so many tokens."""
    from kvlens.text.prompts import Prompt, PromptText

    tokenizer = engine.loaded.tokenizer
    lines = (SENTENCE.format(number=n, room=7 * n % 100, colour=COLOURS[n % 5]) for n in range(1, tokens // 4 + 8))
    ids = tuple(tokenizer("".join(lines))["input_ids"][:tokens])
    return Prompt(PromptText("x"), ids, ("",) * len(ids), (None,) * len(ids))
