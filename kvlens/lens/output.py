"""The text that a run generated, and the character that a part of one was becoming."""

from __future__ import annotations

import re

from kvlens.store.reader import TraceReader

PART = re.compile(r"(\\x[0-9a-f]{2})+")
"""a token that is a part of a character, as kvlens.text.plaintext writes it"""


def output_text(reader: TraceReader) -> str:
    """Return the generated text. For a run that did not finish, join the texts of its tokens: a character of several
    tokens is not whole in any of them."""
    if reader.meta.output_text is not None:
        return str(reader.meta.output_text)
    tokens = reader.tokens()
    return "".join(tokens.loc[tokens["step"] >= reader.meta.asked_steps, "text"])


def becoming(reader: TraceReader, step: int, token: str, output: str | None) -> str:
    """Return the character that a token at `step` begins or continues in an output that shares all tokens before; the
    token's own text if it is no part of a character or the output does not go on."""
    if output is None or not PART.fullmatch(token):
        return token
    tokens = reader.tokens()
    previous = tokens[(tokens["step"] >= reader.meta.asked_steps) & (tokens["step"] < step)].sort_values("step")
    prefix = "".join(previous["text"])
    return output[len(prefix)] if output.startswith(prefix) and len(output) > len(prefix) else token
