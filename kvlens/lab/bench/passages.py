"""Passages of one real text: where each begins, which of them differ, and its tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

from kvlens.refusal import Refusal
from kvlens.tasks.encoding import encoding, token_ends
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


def split_text(seed: int, context_tokens: int, fed_tokens: int, model: str) -> tuple[str, str]:
    """Return what `passage` reads and what it feeds, as texts that go on without a break. model: whose tokens are
    counted. Raises ValueError, one sentence, where the text is too short."""
    words = _words(seed, context_tokens + fed_tokens)
    ends = token_ends(model, words)
    cut = context_tokens - encoding(model, "off").special
    if len(ends) < cut + fed_tokens:
        raise _too_short(len(ends), context_tokens + fed_tokens)
    begin, end = ends[cut - 1], ends[cut + fed_tokens - 1]
    return words[:begin], words[begin:end]


def _words(seed: int, tokens: int) -> str:
    """The text from the beginning of a sentence drawn by the seed, longer than any tokenizer makes so many tokens
    of."""
    text, start = sentences(), begins(seed)
    longest = max(len(sentence) for sentence in text)
    return " ".join((*text[start:], *text[:start]))[: 16 * tokens + longest]


def _too_short(tokens: int, wanted: int) -> ValueError:
    return ValueError(f"the text '{EVALUATION.title}' has {tokens:,} tokens, not {wanted:,}: ask for fewer.")


def passage(
    seed: int, context_tokens: int, fed_tokens: int, tokenizer: Any, max_positions: int
) -> tuple[Prompt, tuple[int, ...]]:
    """(context, the ids fed behind it): whole text of EVALUATION from the beginning of a sentence drawn by the seed, as
    it is, without the chat form. Raises ValueError, one sentence, where the text or the model is too short."""
    target = context_tokens + fed_tokens
    whole = tokenize(PromptText(_words(seed, target)), tokenizer, 1 << 40, 0, "off")
    if len(whole.ids) < target:
        raise _too_short(len(whole.ids), target)
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
