"""One fact of five kinds of answer, in several wordings and three kinds of text, for any tokenizer: what the lens is
measured on, so that its figures hang on no single needle.

The kinds, wordings and texts are ours. Metric: RULER's string_match_all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlens.tasks import texts, words
from kvlens.tasks.base import Encode, TaskPrompt
from kvlens.tasks.generated import Generated
from kvlens.tasks.layout import Content

# fmt: off
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)
# fmt: on
LEAST_TOKENS = 8
"""of a fact in a text of facts, at least"""
MOST_FACTS = 4000
"""of a text of facts; they are begun again when they end"""


@dataclass(frozen=True)
class Wording:
    """How a fact is told and asked for. KEY and VALUE stand for its two parts."""

    fact: str
    question: str
    opening: str
    """how the answer begins in the chat form; empty: the model begins by itself"""


KINDS: dict[str, tuple[Wording, ...]] = {
    "date": (
        Wording("KEY signed the lease on VALUE.", "On which day did KEY sign the lease?", "KEY signed the lease on"),
        Wording("The birthday of KEY is VALUE.", "When is the birthday of KEY?", ""),
        Wording("The next visit of KEY is planned for VALUE.", "For which day is the next visit of KEY planned?", ""),
    ),
    "word": (
        Wording("The password of KEY is VALUE.", "What is the password of KEY?", "The password of KEY is"),
        Wording("The boat that KEY owns is called VALUE.", "What is the name of the boat that KEY owns?", ""),
        Wording("KEY named the new dog VALUE.", "What did KEY name the new dog?", "KEY named the new dog"),
    ),
    "code": (
        Wording(
            "The parcel for KEY has the code VALUE.",
            "Which code has the parcel for KEY?",
            "The parcel for KEY has the code",
        ),
        Wording(
            "The locker of KEY opens with VALUE.",
            "With what does the locker of KEY open?",
            "The locker of KEY opens with",
        ),
        Wording(
            "The booking reference of KEY is VALUE.",
            "What is the booking reference of KEY?",
            "The booking reference of KEY is",
        ),
    ),
    "price": (
        Wording("KEY paid VALUE for the ticket.", "How much did KEY pay for the ticket?", "KEY paid"),
        Wording("The bicycle of KEY costs VALUE.", "How much does the bicycle of KEY cost?", ""),
        Wording("The rent that KEY owes is VALUE.", "How much rent does KEY owe?", "The rent that KEY owes is"),
    ),
    "number": (
        Wording(
            "The member number of KEY is VALUE.", "What is the member number of KEY?", "The member number of KEY is"
        ),
        Wording("KEY counted VALUE stamps.", "How many stamps did KEY count?", "KEY counted"),
        Wording("The telephone extension of KEY is VALUE.", "What is the telephone extension of KEY?", ""),
    ),
}
"""kind of answer -> its wordings"""
MINUTES, NOVEL, FACTS = SOURCES = ("minutes", "novel", "facts")
"""texts around the fact: kvlens.tasks.texts.EVALUATION, CALIBRATION, and facts about other people. The novel is what
some methods are calibrated on; the lens is measured on what a method lost, whatever it was calibrated on"""


@dataclass(frozen=True)
class Fact(Content):
    """A fact with its kind of answer and the text around it."""

    kind: str = ""
    source: str = ""


class AnswerKinds(Generated):
    """One fact at the wanted depth. Its kind of answer, its wording and the text around it are drawn."""

    name, title = "niah_kinds", "five kinds of answer"
    summary = "a date, word, code, price or number, told in several wordings, in three kinds of text"
    new_tokens = 24

    def content(self, rng: random.Random, depth: float) -> tuple[Content, list[str]]:
        kind, source = rng.choice(list(KINDS)), rng.choice(SOURCES)
        wording, (person,), value = rng.choice(KINDS[kind]), words.people(rng, 1), draw(rng, kind)
        sentence = wording.fact.replace("KEY", person).replace("VALUE", value)
        tail = f"\n\nQuestion: {wording.question.replace('KEY', person)} Answer:"
        opening = wording.opening.replace("KEY", person)
        return Fact([sentence], [depth], tail=tail, opening=opening, kind=kind, source=source), [value]

    def make(
        self, length: int | None, depth: float | None, seed: int, encode: Encode, special: int = 1, index: int = 0
    ) -> TaskPrompt:
        prompt = super().make(length, depth, seed, encode, special, index)
        content, _ = self.content(random.Random(f"{self.name}/{seed}"), 0.5)
        assert isinstance(content, Fact)
        return replace(prompt, facts={"kind": content.kind, "source": content.source})

    def haystack(self, content: Content, length: int, rng: random.Random) -> Sequence[str]:
        assert isinstance(content, Fact)
        if content.source == MINUTES:
            return texts.sentences()
        if content.source == NOVEL:
            return texts.sentences(texts.CALIBRATION)
        return [
            sentence
            for sentence in other_facts(rng, min(MOST_FACTS, length // LEAST_TOKENS + 2))
            if not set(_name(content.asked[0])) & set(_name(sentence))
        ]


def draw(rng: random.Random, kind: str) -> str:
    """Return a value of a kind of answer."""
    if kind == "date":
        return f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1900, 2019)}"
    if kind == "word":
        return words.word(rng).capitalize()
    if kind == "code":
        return f"{words.name(rng)[:2]}-{rng.randint(1000, 9999)}-{words.name(rng)[0]}"
    if kind == "price":
        return f"${rng.randint(11, 999)}.{rng.randint(10, 99)}"
    return words.number(rng)


def other_facts(rng: random.Random, count: int) -> list[str]:
    """Return facts of all kinds about other people."""
    facts = []
    for _ in range(count):
        kind, (person,) = rng.choice(list(KINDS)), words.people(rng, 1)
        facts.append(rng.choice(KINDS[kind]).fact.replace("KEY", person).replace("VALUE", draw(rng, kind)))
    return facts


def _name(sentence: str) -> list[str]:
    """Return the first names and surnames that a sentence has."""
    return [word for word in sentence.strip(".").split() if word in words.FIRST_NAMES or word in words.SURNAMES]


KINDS_OF_ANSWERS = AnswerKinds()
