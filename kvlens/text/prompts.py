"""From a person's file or text to a validated prompt: decoded strictly, with token ids and character offsets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlens.refusal import Refusal
from kvlens.text.carried import reply_start
from kvlens.text.chat import ChatForm, choose, refuse_change, template_of
from kvlens.text.plaintext import prompt_pieces
from kvlens.text.segments import Segment, find_segments, pairs_of, refuse_covered, refuse_empty, token_segments

QUESTIONS = ("in", "after")
"""in: the question is part of the prompt that is read and placed; after: it is fed once the context has been placed"""
_HALF = re.compile(r"[\ud800-\udfff]")


class BadPrompt(Refusal):
    """What is wrong with the prompt and what to do about it, in one sentence."""


@dataclass(frozen=True)
class PromptText:
    """What the user gave. needle: character ranges [start, end) that hold the answer, where known."""

    text: str
    answer: str | None = None
    needle: tuple[tuple[int, int], ...] = ()
    task: str | None = None
    seed: int | None = None
    answer_prefix: str = ""
    """words that the answer begins with, fed behind the text; in the chat form behind what begins the answer"""
    question: int | None = None
    """the character of the text with which its question begins; what stands before it is the context"""
    answers: tuple[str, ...] = ()
    """other answers that are right as well as `answer`"""
    segments: tuple[Segment, ...] = ()
    """parts of the text that a person named, in characters"""


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt. pieces: the text of each token; offsets: character range of each token in the source's text,
    None for tokens that are not of it (special ones, the chat template's, the answer's prefix)."""

    source: PromptText
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    offsets: tuple[tuple[int, int] | None, ...]
    form: ChatForm | None = None
    """None: the text as it is"""
    asked: tuple[int, ...] = ()
    """ids that are fed step by step once the ids before them were read and placed: the question and all behind it;
    empty: it is part of `ids`"""
    segments: tuple[Segment, ...] = ()
    """named parts, in tokens of `ids` and `asked` together; (): there is nothing to tell apart"""


def checked(prompt: PromptText, name: str) -> PromptText:
    """Raises BadPrompt when the text is empty or holds NUL characters, or a needle lies outside it."""
    if not prompt.text.strip():
        raise BadPrompt(f"{name} is empty: give a text to run.")
    if _HALF.search(
        "".join((prompt.text, prompt.answer or "", *prompt.answers, prompt.task or "", prompt.answer_prefix))
    ):
        raise BadPrompt(f"{name} holds half of a character (a lone surrogate), which is no text: save it as UTF-8.")
    if "\x00" in prompt.text:
        raise BadPrompt(f"{name} contains NUL characters, so it is not plain text.")
    for start, end in prompt.needle:
        if not 0 <= start < end <= len(prompt.text):
            raise BadPrompt(f"{name}: the needle {start}-{end} lies outside the text of {len(prompt.text)} characters.")
    if prompt.question is not None and not 0 < prompt.question < len(prompt.text):
        raise BadPrompt(f"{name}: the question begins at {prompt.question}, outside the text.")
    return prompt


def asking(prompt: PromptText, question: str) -> PromptText:
    """The prompt as the context of a question, which is put behind it. Raises BadPrompt for an empty question."""
    if not question.strip():
        raise BadPrompt("the question is empty: say what is asked.", code="question_empty")
    context = prompt.text.rstrip()
    return checked(replace(prompt, text=f"{context}\n\n{question.strip()}", question=len(context)), "the question")


def expecting(prompt: PromptText, answer: str | None, passage: str | None) -> PromptText:
    """The prompt with what its owner expects. answer: what a right output says; passage: words of the text that hold
    it, every place where they stand is marked. None or blank: as the prompt has it.

    Raises BadPrompt when the passage is not in the text.
    """
    if answer and answer.strip():
        prompt = checked(replace(prompt, answer=answer.strip()), "the expected answer")
    if passage and passage.strip():
        words = passage.strip()
        places = [match.span() for match in re.finditer(re.escape(words), prompt.text)]
        if not places:
            raise BadPrompt(
                f"the passage '{words[:60]}' is not in the prompt (of a conversation, the last message of the user): "
                "give it exactly as it stands there."
            )
        prompt = replace(prompt, needle=tuple(places))
    return prompt


def segmented(prompt: PromptText, items: Sequence[str]) -> PromptText:
    """The prompt with segments that NAME=MARKER or NAME=START:END name. Raises BadSegment."""
    return with_segments(prompt, pairs_of(items))


def with_segments(prompt: PromptText, pairs: Sequence[tuple[str, str | tuple[int, int]]]) -> PromptText:
    """Return the prompt with segments of (name, marker or range) in place of its own; as it is where there are no
    pairs. Raises BadSegment, also for a segment that the question or other segments cover."""
    if not pairs:
        return prompt
    segments = find_segments(pairs, prompt.text)
    refuse_covered(segments, len(prompt.text), prompt.question)
    return replace(prompt, segments=segments)


def tokenize(
    source: PromptText,
    tokenizer: Any,
    max_positions: int | None,
    max_new: int,
    chat: str = "auto",
    system: str | None = None,
    question: str = "in",
    form: ChatForm | None = None,
    turns: Sequence[tuple[str, str]] = (),
    arguments: Mapping[str, Any] | None = None,
    carried: bool = False,
) -> Prompt:
    """Token ids with offsets into the source's text. The chat form is the template's own text; without it the tokenizer
    adds its special tokens. Whether the question is read with its context or fed after it, the tokens are the same.
    max_positions None: whether it fits the model is asked elsewhere. form: the chat form of a stored run, taken as it
    was; None: `chat` and `system` choose it. carried: the first of several turns is read and placed, and all that
    follows it is fed after it.

    Raises BadPrompt when the prompt has fewer than 2 tokens or does not fit the model together with `max_new` tokens,
    or where a question shall be fed after its context and the prompt does not say where it begins; BadTemplate for a
    chat form that cannot be had; BadSegment for a named segment without a token; Refusal for turns that cannot be
    carried.
    """
    if form is None:
        template = template_of(tokenizer)
        form = choose(template, chat, system, turns, arguments)
        if form is not None and template is not None:
            refuse_change(template, form, source.text, turns)
    fed, begin, kept_range = (source.text, 0, (0, len(source.text))) if form is None else form.around(source.text)
    fed += source.answer_prefix
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(fed, return_offsets_mapping=fast, return_attention_mask=False, add_special_tokens=form is None)
    ids: Sequence[int] = encoded["input_ids"]
    if len(ids) < 2:
        raise BadPrompt(f"the prompt has {len(ids)} token(s); at least 2 are needed.")
    if max_positions is not None:
        refuse_longer(len(ids), max_new, max_positions)
    ranges = encoded["offset_mapping"] if fast else [(0, 0)] * len(ids)
    pieces = prompt_pieces(fed, ids, ranges, tokenizer.decode)
    offsets = tuple(_inside(int(a) - begin, int(b) - begin, *kept_range) for a, b in ranges)
    cut = len(ids)
    if carried:
        cut = _token_at(ranges, reply_start(*(("", "") if form is None else (form.before, form.after)), turns))
    elif question != "in":
        cut = _token_at(ranges, begin + question_start(source))
    moved = [Segment(part.name, begin + part.start, begin + part.end) for part in source.segments]
    segments = token_segments(
        [(int(a), int(b)) for a, b in ranges],
        "" if form is None else form.before,
        (begin + kept_range[0], begin + kept_range[1]),
        moved,
        None if source.question is None else begin + source.question,
        None if form is None else form.system,
        turns,
        form is not None,
    )
    if fast:
        refuse_empty(moved, segments)
    fed_later = tuple(ids[cut:])
    return Prompt(source, tuple(ids[:cut]), pieces[:cut], offsets[:cut], form, fed_later, segments if fast else ())


def refuse_longer(tokens: int, max_new: int, max_positions: int, reach: int | None = None) -> None:
    """Raises BadPrompt where a prompt and what follows it do not fit the model. reach: positions that attention tells
    apart, None: as many as tokens."""
    if (tokens + max_new if reach is None else reach) > max_positions:
        raise BadPrompt(
            f"the prompt has {tokens:,} tokens and {max_new:,} more were asked for, but the model takes "
            f"{max_positions:,}: shorten the prompt or lower --max-new.",
            code="too_long",
            tokens=tokens,
            most=max_positions,
        )


def question_start(source: PromptText) -> int:
    """The character with which the question begins. Raises BadPrompt where the prompt does not say."""
    if source.question is None:
        raise BadPrompt(
            "the prompt does not say where its question begins, so the question cannot be fed after the context: "
            "give the question with --ask, or run with --question in.",
            code="question_unmarked",
        )
    return source.question


def _token_at(ranges: Sequence[tuple[int, int]], character: int) -> int:
    """Return the first token that holds a character of what is fed later, which begins with `character` of the text as
    it is fed. Raises BadPrompt where there is none, or no context before it."""
    cut = next((first_token for first_token, (_, end) in enumerate(ranges) if end > character), None)
    if cut is None:
        raise BadPrompt("the model's tokenizer does not say where tokens stand in the text: run with --question in.")
    if cut < 2:
        raise BadPrompt("before the question stand fewer than 2 tokens of context: give a text to ask about.")
    return cut


def _inside(start: int, end: int, first: int, last: int) -> tuple[int, int] | None:
    """The part of a range that lies in [first, last)."""
    start, end = max(start, first), min(end, last)
    return (start, end) if end > start else None
