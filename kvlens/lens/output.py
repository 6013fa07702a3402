"""The text that a run generated."""

from __future__ import annotations

from kvlens.store.reader import TraceReader


def output_text(reader: TraceReader) -> str:
    """Return the generated text. For a run that did not finish, join the texts of its tokens: a character of several
    tokens is not whole in any of them."""
    if reader.meta.output_text is not None:
        return str(reader.meta.output_text)
    tokens = reader.tokens()
    return "".join(tokens.loc[tokens["step"] >= reader.meta.asked_steps, "text"])
