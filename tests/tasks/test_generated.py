"""Generated tasks for any tokenizer: length, whole sentences, needles that hold what is asked, determinism, answers
that can be read off the text."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import raises_code

from kvlens import tasks
from kvlens.demo.encode import demo_encode
from kvlens.lab.tasks import frequent, shelves, tracking
from kvlens.refusal import Refusal
from kvlens.tasks import Encode, Encoding, TaskPrompt, layout, texts
from kvlens.tasks.base import MOST_LENGTH

FORMED = ("instruction_first", "instruction_last", "instructions", "countdown", "countdown_among", "months")
"""whose prompts hold an instruction or an example beside the text (test_instructions.py,
test_countdown.py, test_months.py)"""
NAMES = [name for name, task in tasks.registry().items() if not task.demo_language and name not in FORMED]
PLACED = [name for name in NAMES if tasks.get(name).placed and name != "variable_tracking"]
COUNTED = ("common_words", "frequent_words")
NEEDLES = ("niah_needles", "niah_needles_identifier")
SHELVES = (*NEEDLES, "niah_noise", "niah_identifier")
HEADS = dict.fromkeys(NAMES, layout.HEAD) | {"variable_tracking": tracking.HEAD}
SETTINGS = settings(max_examples=25, deadline=None)
ASKED = {
    "name": st.sampled_from(NAMES),
    "length": st.integers(900, 2400),
    "depth": st.sampled_from([0.0, 0.1, 0.35, 0.5, 0.9, 1.0]),
    "seed": st.integers(0, 2**31),
}


def by_word(text: str) -> list[int]:
    """A token per run of letters and digits and per other mark."""
    return list(range(len(re.findall(r"\w+|[^\w\s]", text))))


def by_pair(text: str) -> list[int]:
    """A token per two characters: pieces merge with what stands before them."""
    return list(range((len(text) + 1) // 2))


def encoders() -> dict[str, Encode]:
    return {"demo": demo_encode(), "words": by_word, "pairs": by_pair, "characters": lambda text: list(text.encode())}


def make(name: str, length: int, depth: float, seed: int, encode: Encode = by_word, special: int = 1) -> TaskPrompt:
    return tasks.get(name).make(length, depth, seed, encode, special)


def derived(asked: TaskPrompt) -> list[str]:
    """The answer's parts, found in the text by a reader that knows the language of the tasks but not the generator."""
    assert asked.question is not None
    text, question = asked.text[: asked.question], asked.text[asked.question :]
    assert question.startswith("\n\nQuestion: ")
    if asked.task == "variable_tracking":
        value = re.search(r"value (\d+)", question)
        assert value is not None
        holds = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text))
        found = [name for name, source in holds.items() if source == value.group(1)]
        for name in found:
            found += [other for other, source in holds.items() if source == name]
        return found
    if asked.task == "common_words":
        return [word for word, _ in Counter(re.findall(r"\d+\. (\w+)", text)).most_common(10)]
    if asked.task == "frequent_words":
        listed = Counter(re.findall(r"\b[a-z]{6}\b", text.partition("\n\n")[2])).most_common(4)
        assert listed[2][1] > listed[3][1]
        return [word for word, _ in listed[:3]]
    if asked.task in SHELVES:
        marks = dict(re.findall(r"The shelf mark of (?:the|entry) ([\w -]+) is ([\w-]+)\.", text))
        return [marks[key] for key in re.findall(r"shelf mark of (?:the|entry) ([\w -]+)\?", question)]
    if asked.task == "list_items":
        entries = dict(re.findall(r"The (\w+) entry of the list is ([a-z ]+)\.", text))
        return [entries[ordinal] for ordinal in ("first second third fourth fifth sixth seventh eighth").split()]  # noqa: SIM905
    if asked.task == "copy_text":
        passages = dict(re.findall(r"Passage (\d+) reads: ([a-z ]+)\.", text))
        return [passages[number] for number in re.findall(r"passage (\d+)", question)]
    if asked.task == "kv_lookup":
        rooms = dict(re.findall(r"(\w+ \w+) is in room (\d+)\.", text))
        return [rooms[name] for name in re.findall(r"room is (\w+ \w+)\?", question)]
    if asked.task == "niah_kinds":
        start, end = asked.needle[0]
        return [answer for answer in asked.answers if answer in text[start:end] and answer not in question]
    facts = re.findall(r"library card numbers? of (\w+ \w+) is (\d+)\.", text)
    return [value for key in re.findall(r"[A-Z]\w+ [A-Z]\w+", question) for name, value in facts if name == key]


@SETTINGS
@given(**ASKED, which=st.sampled_from(["demo", "words", "pairs", "characters"]), special=st.integers(0, 2))
def test_the_length_is_met_within_two_percent_and_never_exceeded(
    name: str, length: int, depth: float, seed: int, which: str, special: int
) -> None:
    length *= 6 if which == "characters" else 3 if which == "pairs" else 2 if which == "demo" else 1
    encode = encoders()[which]
    asked = make(name, length, depth, seed, encode, special)
    tokens = special + len(encode(asked.text))
    assert tokens <= length
    if name in NEEDLES:  # whose sentences are about as long as one another
        start, end = asked.needle[0]
        assert length - tokens <= max(0.02 * length, 1.3 * len(encode(" " + asked.text[start:end])))
    else:
        assert 0.98 * length <= tokens


@SETTINGS
@given(**ASKED)
def test_around_the_facts_stand_whole_sentences_of_the_text_in_their_order(
    name: str, length: int, depth: float, seed: int
) -> None:
    asked = make(name, length, depth, seed)
    if name in (*COUNTED, *NEEDLES, "niah_noise", "niah_kinds"):  # the last draws its text
        return
    text, known = asked.text[: asked.question].removeprefix(HEADS[name]), texts.sentences()
    places = sorted((at, sentence) for sentence in set(known) if (at := text.find(sentence)) >= 0)
    order = [
        known.index(sentence) for _, sentence in places if text.count(sentence) == 1 and known.count(sentence) == 1
    ]
    assert sum((b - a) % len(known) != 1 for a, b in pairwise(order)) <= 6, "one run, and what was fitted in at its end"
    left = text
    for sentence in sorted({sentence for _, sentence in places}, key=len, reverse=True):
        left = left.replace(sentence, "")
    task = tasks.get(name)
    hidden = task.content(random.Random(f"{name}/{seed}"), depth)[0]  # type: ignore[attr-defined]
    for fact in (*hidden.asked, *hidden.others):
        assert fact in left
        left = left.replace(fact, "", 1)
    assert not left.strip(), "nothing else, no padding"


def test_the_texts_are_what_they_were_and_evaluation_is_not_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not set(texts.sentences(texts.EVALUATION)) & set(texts.sentences(texts.CALIBRATION))
    for text in (texts.EVALUATION, texts.CALIBRATION):
        assert all(sentence == sentence.strip() and sentence.isascii() for sentence in texts.sentences(text))
        assert f"`{text.file}`" in (texts.CORPUS / "README.md").read_text()
    changed = texts.Text("changed.txt", "", texts.EVALUATION.sha256)
    monkeypatch.setattr(texts, "CORPUS", tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        texts.paragraphs(changed)
    (tmp_path / "changed.txt").write_text("Another text.\n")
    with pytest.raises(ValueError, match="was changed"):
        texts.paragraphs(changed)


@SETTINGS
@given(**ASKED)
def test_the_same_seed_gives_the_same_prompt_and_another_another(
    name: str, length: int, depth: float, seed: int
) -> None:
    assert make(name, length, depth, seed) == make(name, length, depth, seed)
    assert make(name, length, depth, seed).answer != make(name, length, depth, seed + 1).answer


@SETTINGS
@given(**ASKED)
def test_the_answer_can_be_read_off_the_text_and_scores_one(name: str, length: int, depth: float, seed: int) -> None:
    asked = make(name, length, depth, seed)
    assert Counter(derived(asked)) == Counter(asked.answers)
    task = tasks.get(name)
    assert task.grade(asked, asked.answer) == task.score(asked.answer, f"{asked.answer}. And on.") == 1.0
    assert task.grade(asked, "") == 0.0
    again = tasks.remake({"task": name, "length": length, "depth": depth, "seed": seed, "index": 0}, Encoding(by_word))
    assert again == replace(asked, opening="")


@SETTINGS
@given(**ASKED)
def test_needles_cut_out_the_asked_facts(name: str, length: int, depth: float, seed: int) -> None:
    asked = make(name, length, depth, seed)
    facts = [asked.text[start:end] for start, end in asked.needle]
    assert all(fact.endswith(".") for fact in facts)
    if name == "variable_tracking":
        starts = [start for start, _ in asked.needle]
        assert starts == sorted(starts), "assignments stand in the order of the chain"
        assert all(
            f"VAR {new} = VAR {old}." == fact
            for (old, new), fact in zip(pairwise(asked.answers), facts[1:], strict=True)
        )
    elif name not in COUNTED:
        assert len(facts) == len(asked.answers)
        assert all(part in fact for part, fact in zip(asked.answers, facts, strict=True))


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_first_asked_fact_stands_at_its_depth(name: str, depth: float) -> None:
    asked = make(name, 2000, depth, 3)
    body = len(HEADS[name]), asked.question or 0
    start, end = asked.needle[0]
    assert abs((start - body[0]) / (body[1] - body[0] - (end - start)) - depth) < 0.06
    if len(asked.needle) == 1 and name != "kv_lookup":  # of a list, the needle is one entry
        assert depth != 0.0 or start == body[0]
        assert depth != 1.0 or end == body[1]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_around_the_fact_stands_noise_and_nothing_else(seed: int) -> None:
    asked = make("niah_noise", 900, 0.5, seed)
    (start, end), text = asked.needle[0], asked.text[: asked.question]
    around = text[len(layout.HEAD) : start] + text[end + 1 :]
    found = re.findall(r"[A-Z][a-z ]+\.", around)
    assert " ".join(found) == around
    assert all(
        (shelves.NOISE.index(b) - shelves.NOISE.index(a)) % len(shelves.NOISE) == 1 for a, b in pairwise(found[:-1])
    ), "in their order, but for the last, which is fitted in"


@settings(max_examples=10, deadline=None)
@given(name=st.sampled_from(NEEDLES), seed=st.integers(0, 2**31))
def test_every_sentence_of_a_haystack_of_needles_is_one_and_only_one_is_asked(name: str, seed: int) -> None:
    asked = make(name, 1500, 0.5, seed)
    body = asked.text[len(layout.HEAD) : asked.question]
    facts = re.findall(r"The shelf mark of (?:the|entry) ([\w -]+) is ([\w-]+)\.", body)
    assert len(facts) == body.count(".") > 40
    keys, values = Counter(key for key, _ in facts), Counter(value for _, value in facts)
    assert max(keys.values()) == max(values.values()) == 1


def test_frequent_words_are_as_often_as_rulers_formula_has_them() -> None:
    # n = 1,000: 607.9, 151.9, 67.5, 37.9, 24.3 of zeta(2) = 1.644934
    assert frequent.counts(1000, 5) == [607, 151, 67, 37, 24]
    body = make("frequent_words", 2000, 0.5, 7).text.partition("\n\n")[2].partition("\n\n")[0].split()
    found = Counter(body)
    drawn = next(n for n in range(4000) if frequent.counts(n, 1)[0] == found["..."])
    wanted = [frequent.counts(n, 40) for n in range(drawn, drawn + 3)]
    assert [count for _, count in found.most_common()] in [[c for c in counts if c] for counts in wanted]
    assert len(found) <= 2000 // frequent.PER_WORD


def test_partial_answers_score_their_share() -> None:
    asked = make("niah_multivalue", 900, 0.5, 1)
    assert tasks.score("niah_multivalue", asked.answer, f"{asked.answers[0]} and {asked.answers[3]}") == 0.5
    assert tasks.score("list_items", " amber bell, wild fox", "wild fox, amber bell") == 0.5, "order counts"
    assert tasks.score("copy_text", " river bell stone crown", "river bell fox crown") == 0.5
    assert tasks.score("copy_text", " river bell", "river bell. Question") == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_too_short_a_length_says_what_is_needed(name: str) -> None:
    with raises_code("too_short", tokens=20):
        make(name, 20, 0.5, 0)
    with pytest.raises(ValueError, match="needs a length"):
        tasks.get(name).make(None, 0.5, 0, by_word)


def test_a_length_that_no_model_takes_is_refused_before_a_text_is_made() -> None:
    def encode(text: str) -> list[int]:
        raise AssertionError("no text is counted")

    for name in ("needle", "niah_single"):
        with raises_code("too_long", Refusal, tokens=MOST_LENGTH + 1, most=MOST_LENGTH):
            tasks.ask(tasks.get(name), MOST_LENGTH + 1, 0.5, 0, Encoding(encode))
