"""Counting tokens before a run, without transformers: by the tokenizer of the chosen model when it is on this
machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import streamlit as st

from kvlens.models.find import DEMO, SMOLLM2, ready, resolve
from kvlens.tasks import Encoding
from kvlens.tasks.encoding import encoding, encoding_in


def counting(
    model: str, chat: str = "auto", system: str | None = None, arguments: Mapping[str, Any] | None = None
) -> tuple[Encoding, str | None]:
    """How the model's prompts are counted, and, where another tokenizer stands in for its own, why. The real model that
    a package carries is made ready here at its first use, which takes seconds.

    Raises ValueError with one sentence for a chat form or a template's argument that cannot be had."""
    if model == DEMO:
        return encoding(DEMO, chat, system, arguments), None
    try:
        if model == SMOLLM2 and ready(model) is None:
            with st.spinner("Making smollm2 ready: its first use converts it, once…"):
                resolve(model)
        folder = ready(model)
    except ValueError as problem:
        return _stand_in(), str(problem)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return _stand_in(), f"The tokenizer of {model} can be read when it has been loaded once."
    return encoding_in(folder, chat, system, arguments=arguments), None


@lru_cache(maxsize=1)
def _stand_in() -> Encoding:
    return encoding(DEMO)
