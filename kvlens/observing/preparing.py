"""What an observed run shares with other runs: the loaded model, the prompt that was fed, a request for full KV."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from kvlens.engine.engine import Engine
from kvlens.engine.models import LoadedModel, describe_model
from kvlens.engine.objects import adopt, source_name
from kvlens.metaparts import OBJECT
from kvlens.models.errors import UnsupportedModel
from kvlens.observing.observer import Observer
from kvlens.runs.preparing import Prepared
from kvlens.runs.request import RunRequest
from kvlens.text.plaintext import TokenStream
from kvlens.text.prompts import Prompt, PromptText, expecting

REFERENCE = "full"
OWN_ROOM = 64
"""new tokens that full KV may make where an observed run stopped at a token that ends answers"""


def describe_caller(model: Any, tokenizer: Any, name: str | None) -> tuple[LoadedModel, str | None]:
    """Return (the caller's model as runs describe it, why kvlens cannot run full KV of it; None: it can)."""
    try:
        return adopt(model, tokenizer, name), None
    except UnsupportedModel as refusal:
        return describe_model(name or source_name(model.config), model, tokenizer, OBJECT), str(refusal)


def prompt_of(observer: Observer, tokenizer: Any, answer: str | None, needle: str | None) -> Prompt:
    """Return the prompt that was fed, with the text of its tokens. Raises BadPrompt for a needle that is not in it."""
    ids = tuple(observer.tokens[: observer.prompt_tokens])
    stream = TokenStream(tokenizer.decode)
    pieces = tuple(stream.text(token) for token in ids)
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    offsets = tuple((a, b) if b > a else None for a, b in itertools.pairwise(ends))
    source = expecting(PromptText("".join(pieces)), answer, needle)
    asked = tuple(step.token for step in observer.steps[: count_asked(observer)])
    return Prompt(source, ids, pieces, offsets, None, asked)


def count_asked(observer: Observer) -> int:
    """Return how many steps feed a question: their tokens were given, or no logits were made of them."""
    count = 0
    for step in observer.steps[:-1]:
        if step.logits is not None and step.position + 1 >= observer.given_end:
            break
        count += 1
    return count


def prepare_observed(loaded: LoadedModel, prompt: Prompt, tokens: Sequence[int]) -> tuple[Prepared, RunRequest]:
    """Return what full KV of the same prompt needs. tokens: that the observed steps came to. Full KV has as many steps;
    where the run ended its answer by itself, full KV has at least OWN_ROOM to end its own."""
    steps = len(tokens) - len(prompt.asked)
    if tokens and tokens[-1] in loaded.eos:
        steps = max(steps, OWN_ROOM)
    request = RunRequest(
        model=loaded.name,
        method=REFERENCE,
        max_new=max(1, steps),
        chat="off",
        question="after" if prompt.asked else "in",
        device=str(loaded.model.device),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
    )
    return Prepared(Engine(loaded), prompt, loaded.fingerprint()), request
