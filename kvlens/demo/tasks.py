"""Generated retrieval tasks in the demo language: a prompt of a wanted length with the asked fact at a wanted depth.

The haystack is the demo language's filler or sentences given by the caller; everything is drawn afresh from the seed,
so no value can have been learnt.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlens.demo import language
from kvlens.refusal import Refusal

TASKS = ("needle", "multikey", "chain", "note", "list")
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt (without a beginning-of-text token), the expected continuation and where the asked facts stand in the
    text."""

    text: str
    answer: str
    needle: tuple[tuple[int, int], ...]
    task: str
    length: int
    depth: float
    seed: int


@dataclass(frozen=True)
class _Content:
    """What a task puts into the haystack: the asked sentences in order, other facts, the question, its answer."""

    asked: list[str]
    others: list[str]
    question: str
    answer: str


def _content(task: str, rng: random.Random, kind: str, number: int, hops: int, items: int) -> _Content:
    if task == "chain":
        sentences, question, answer = language.make_chain(rng, hops)
        return _Content(sentences, [], question, answer)
    if task == "list":
        facts, question, answer = language.make_list(rng, items)
        return _Content([fact.sentence for fact in facts], [], question, answer)
    kind = "note" if task == "note" else kind
    asked_fact = language.make_fact(rng, kind)
    more: dict[str, str] = {}
    fact_count = {"needle": 0, "note": 2}.get(task, number)
    for _ in range(100 * fact_count):
        if len(more) == fact_count:
            break
        fact = language.make_fact(rng, kind)
        if fact.key != asked_fact.key:
            more.setdefault(fact.key, fact.sentence)
    return _Content([asked_fact.sentence], list(more.values()), asked_fact.question, asked_fact.answer)


def _check(task: str, length: int, depth: float, kind: str, number: int, hops: int, items: int) -> None:
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known tasks: {', '.join(TASKS)}")
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth must lie between 0 and 1, not {depth}")
    if length < 1:
        raise ValueError(f"length must be a positive number of tokens, not {length}")
    if kind not in language.FACT_KINDS:
        raise ValueError(f"unknown kind of fact {kind!r}; known kinds: {', '.join(language.FACT_KINDS)}")
    for name, value, low, high in (("others", number, 0, 200), ("hops", hops, 1, 20), ("items", items, 1, 15)):
        if not low <= value <= high:
            raise ValueError(f"{name} must lie between {low} and {high}, not {value}")


def _nearest(ends: list[int], goal: float) -> int:
    """Index into `ends` (running token counts, starting with 0) that lies nearest to the goal."""
    return min(range(len(ends)), key=lambda i: abs(ends[i] - goal))


def make_prompt(
    task: str,
    length: int,
    depth: float,
    seed: int,
    encode: Encode,
    *,
    kind: str = "code",
    others: int = 8,
    hops: int = 3,
    items: int = 8,
    filler: Sequence[str] | None = None,
) -> TaskPrompt:
    """A prompt of at most `length` tokens (with one beginning-of-text token) and close to it.

    `depth` is the place of the asked fact in the haystack (0 its start, 1 its end); of a chain or list the first asked
    fact stands there and the rest at random. `encode` maps text to token ids without special tokens. `kind` and
    `others` belong to needle and multikey, `hops` to chain, `items` to list. `filler` gives the sentences of the
    haystack in order.
    """
    _check(task, length, depth, kind, others, hops, items)
    rng = random.Random(f"{task}/{seed}")
    content = _content(task, rng, kind, others, hops, items)
    tail = language.ask(content.question)

    def size(sentence: str) -> int:
        return len(encode(" " + sentence))

    asked_size = sum(map(size, content.asked))
    least = 1 + len(encode(tail)) + asked_size
    if length < least:
        raise Refusal(
            f"a {task} prompt needs at least {least} tokens with this tokenizer, not {length}",
            code="too_short",
            needed=least,
            tokens=length,
        )
    room = length - least
    crowd: list[str] = []
    for sentence in content.others:
        if size(sentence) <= room:
            crowd.append(sentence)
            room -= size(sentence)
    sentences = iter(filler) if filler is not None else None
    hay: list[str] = []
    misses = 0
    while misses < 20:
        piece = next(sentences, None) if sentences is not None else language.filler(rng)
        if piece is None:
            break
        if size(piece) <= room:
            hay.append(piece)
            room -= size(piece)
        else:
            misses += 1
    for sentence in crowd:
        hay.insert(rng.randrange(len(hay) + 1), sentence)

    while True:
        placed = _place(hay, content.asked, depth, size, random.Random(f"places/{seed}"))
        text = " ".join(sentence for sentence, _ in placed) + tail
        if 1 + len(encode(text)) <= length or not hay:
            break
        hay.pop()
    spans: dict[int, tuple[int, int]] = {}
    start = 0
    for sentence, index in placed:
        if index >= 0:
            spans[index] = (start, start + len(sentence))
        start += len(sentence) + 1
    needle = tuple(spans[index] for index in sorted(spans))
    return TaskPrompt(text, content.answer, needle, task, length, depth, seed)


def _place(
    hay: list[str], texts: list[str], depth: float, size: Callable[[str], int], rng: random.Random
) -> list[tuple[str, int]]:
    """Haystack and asked sentences in the order of the text, each with its index among the asked ones or -1."""
    ends = [0]
    for sentence in hay:
        ends.append(ends[-1] + size(sentence))
    slots = [(_nearest(ends, depth * ends[-1]), 0)]
    slots += [(rng.randrange(len(hay) + 1), index) for index in range(1, len(texts))]
    by_slot: dict[int, list[int]] = {}
    for slot, index in slots:
        by_slot.setdefault(slot, []).append(index)
    placed: list[tuple[str, int]] = []
    for position in range(len(hay) + 1):
        here = by_slot.get(position, [])
        rng.shuffle(here)
        if 0 in here and depth in (0.0, 1.0):  # the asked fact keeps the very first or last place
            here.remove(0)
            here.insert(0 if depth == 0.0 else len(here), 0)
        placed += [(texts[index], index) for index in here]
        if position < len(hay):
            placed.append((hay[position], -1))
    return placed


def score(task: str, answer: str, output: str) -> float:
    """1 for an exact match of the first line, else 0; for a list the share of its entries that are right."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known tasks: {', '.join(TASKS)}")
    expected = answer.strip()
    lines = output.strip().splitlines()
    answer_line = lines[0].strip() if lines else ""
    if task != "list":
        return float(answer_line == expected)
    entries = [entry.strip().rstrip(".") for entry in expected.split(",")]
    named_answers = {entry.strip().rstrip(".") for entry in re.split(r"[,;]", answer_line)}
    return sum(entry in named_answers for entry in entries) / len(entries)
