"""Passages of one real text: where each begins, which of them differ, and its tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

from kvlens.refusal import Refusal
from kvlens.tasks.texts import EVALUATION, sentences
from kvlens.text.prompts import Prompt, PromptText, tokenize

CHARACTERS = 6
"""of a token at most, on average over a passage (up to 5.7 of this text with the real model's tokenizer)"""


def begins(seed: int) -> int:
    """Number of the sentence at which a passage begins."""
    return random.Random(f"text/{seed}").randrange(len(sentences()))


def distinct(first_seed: int, count: int) -> list[int]:
    """The first `count` indices whose passages begin at sentences of their own: two that begin alike would be one,
    counted twice. Raises ValueError, one sentence, where the text does not have so many."""
    if count > len(sentences()):
        raise ValueError(
            f"the text '{EVALUATION.title}' has {len(sentences()):,} sentences to begin at: ask for fewer."
        )
    mapping: dict[int, int] = {}
    index = 0
    while len(mapping) < count:
        mapping.setdefault(begins(first_seed + index), index)
        index += 1
    return list(mapping.values())


def apart(first_seed: int, count: int, tokens: int) -> list[int]:
    """The first `count` indices whose passages of so many tokens share no text, a token taken for at most
    CHARACTERS. Raises ValueError, one sentence, where the text does not have so many."""
    places = list(accumulate((len(sentence) + 1 for sentence in sentences()), initial=0))
    whole, least, results = places[-1], CHARACTERS * tokens, dict[int, int]()
    for index in range(100 * count):
        position = places[begins(first_seed + index)]
        if all(least <= abs(position - counterpart) <= whole - least for counterpart in results.values()):
            results[index] = position
            if len(results) == count:
                return list(results)
    raise ValueError(
        f"the text '{EVALUATION.title}' has no {count} passages of {tokens:,} tokens apart: ask for fewer."
    )


def passage(
    seed: int, context_tokens: int, fed_tokens: int, tokenizer: Any, max_positions: int
) -> tuple[Prompt, tuple[int, ...]]:
    """(context, the ids fed behind it): whole text of EVALUATION from the beginning of a sentence drawn by the seed, as
    it is, without the chat form. Raises ValueError, one sentence, where the text or the model is too short."""
    text, target = sentences(), context_tokens + fed_tokens
    start = begins(seed)
    words = " ".join((*text[start:], *text[:start]))
    longest = max(len(sentence) for sentence in text)
    words = words[: 16 * target + longest]  # more than any tokenizer makes so many tokens of
    whole = tokenize(PromptText(words), tokenizer, 1 << 40, 0, "off")
    if len(whole.ids) < target:
        raise ValueError(f"the text '{EVALUATION.title}' has {len(whole.ids):,} tokens, not {target:,}: ask for fewer.")
    if target > max_positions:
        raise Refusal(
            f"{target:,} tokens are more than the model takes ({max_positions:,}): ask for fewer.",
            code="model_too_short",
            tokens=target,
            most=max_positions,
        )
    cut = context_tokens
    context = replace(whole, ids=whole.ids[:cut], pieces=whole.pieces[:cut], offsets=whole.offsets[:cut])
    return context, whole.ids[cut:target]
