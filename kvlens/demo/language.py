# ruff: noqa: SIM905 (word lists read better as text)
"""Words, facts and filler sentences of the demo language: plain English that a very small model can learn to read.

Every word of these lists is one token of the demo tokenizer (kvlens/lab/training/demo/tokenizer.py), so that names and
values have a constant width. In every fact the key stands right before ' is VALUE' (or ' says VALUE'): a small model
finds a value beside its key only.
"""

import random
from dataclasses import dataclass
from itertools import pairwise

FIRST = (
    "Elena Tom Ada Marcus Nadia Oscar Ruth Felix Clara Hugo Irene Victor Maya Leon Alice Simon Vera Paul Lucy "
    "Peter Rosa Adam Julia Max Hannah Boris Nora Ivan Sofia David Emma Carl Laura Henry Olga Martin Grace Daniel "
    "Lena Robert Anna George Eva Frank Sara Otto Mia Ralph Dora Amir Leila Kenji Yuki Chen Priya Arjun Omar Zara "
    "Diego Ines Mateo Chloe Nils Freya"
).split()
LAST = (
    "Marsh Reed Cole Vance Holt Price Stone Fisher Grant Ward Lane Brooks Hayes Frost Blake Dunn Cross Sharp "
    "Wells Nash Pope Quinn Shaw Voss Keller Moreau Novak Petrov Rossi Silva Tanaka Sato Kim Park Singh Patel Khan "
    "Haddad Mendes Costa Lopez Ramos Berg Lund Dahl Holm Lind Weber Vogel Bauer Ritter Moss Flint Thorn Birch "
    "Carver Mercer Draper Fowler Tanner Turner Archer Porter Mason"
).split()
COUNTRY = (
    "Norway Sweden Denmark Finland Iceland France Spain Portugal Italy Greece Poland Hungary Austria Ireland "
    "Belgium Turkey Egypt Morocco Kenya Ghana Chile Peru Brazil Mexico Canada Cuba Japan China India Nepal"
).split()
CITY = (
    "Oslo Paris Madrid Lisbon Rome Athens Warsaw Vienna Dublin Cairo Lagos Lima Boston Denver Austin Chicago "
    "Seattle Toronto Havana Tokyo Osaka Delhi Mumbai Hanoi Bangkok Sydney Perth Geneva Zurich Munich Hamburg "
    "Berlin Prague Bergen Turin Milan Naples Porto Lyon Leeds York Oxford Bath Cork"
).split()
COLOR = "red blue green yellow purple orange white black silver golden brown pink grey violet amber indigo".split()
OBJECT = (
    "parcel key map lantern letter ring compass ledger violin camera medal statue mirror crown sword necklace "
    "diary clock vase mask painting bottle helmet drum flute coin basket scroll globe kettle"
).split()
JOB = (
    "teacher doctor lawyer builder farmer pilot baker nurse sailor painter writer judge chemist driver tailor "
    "miner clerk gardener plumber singer dancer banker"
).split()
NOUN = (
    "river garden bridge market harbor museum library station tower castle valley forest mountain island village "
    "school theater hotel factory church office kitchen window table paper ship train horse bird tree cloud storm "
    "winter summer morning evening bread coffee sugar salt iron copper cotton glass stone music story song game "
    "dream voice hand"
).split()
ADJECTIVE = (
    "plain new quiet busy small large narrow wide bright dark warm cold gentle heavy sudden late simple strange "
    "famous remote modern pale crowded local distant calm rapid steady brief formal"
).split()
BODY = (
    "council committee ministry company society union board agency bank university hospital institute club court"
).split()
TOPIC = (
    "trade energy water health housing transport education security climate fishing mining farming science "
    "culture sport travel finance"
).split()
VERB = (
    "opened closed visited praised repaired inspected described painted measured reported discussed approved "
    "rejected delayed supported reviewed"
).split()
MONTH = "January February March April May June July August September October November December".split()
DAY = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PLACE = "locker gate room vault cabin cellar".split()
COUNT = ("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen").split()
WORDS = sorted({*COLOR, *OBJECT, *JOB, *NOUN, *ADJECTIVE, *TOPIC, *BODY})
SYLLABLES = (
    "ba be bi bo da de do fa fe ga go ka ke ki ko la le li lo lu ma me mi mo na ne ni no pa pe ra re ri ro sa se "
    "si so ta te ti to va ve vi vo za ze zo dr tr kr st sh th an en in on ar er or"
).split()
FACT_KINDS = ("code", "badge", "born", "job", "pass", "place", "note")

_FILLER = (
    "In {month}, the {topic} {body} {verb} a {adj} {noun} near {city}.",
    "{person} walked to the {noun} and talked about {topic}.",
    "The {noun} in {city} was {adj} and the {noun} was {adj}.",
    "On {day}, the {job} {verb} the {adj} {noun}.",
    "Nobody in {city} remembered the {adj} {noun}.",
    "The {body} of {city} {verb} the report on {topic}.",
    "A {job} from {country} {verb} the {noun} in {month}.",
    "It was a {adj} {day} and the {noun} stayed {adj}.",
    "The {color} {object} stood beside the {noun}.",
    "{person} said that {topic} was more important than {topic}.",
    "The meeting about {topic} began at {hour} and ended late.",
    "Many people in {country} liked the {adj} {noun}.",
    "The {job} and the {job} met near the {noun}.",
    "There were {visitors} visitors at the {noun} on {day}.",
    "Later, {person} {verb} the {noun} again.",
    "The {topic} {body} met in {city} every {day}.",
    "After the storm, the {noun} looked {adj}.",
    "The {adj} {noun} was {verb} by the {job}.",
    "A letter from {city} described the {adj} {noun}.",
    "Few members of the {body} trusted the {job}.",
    "The road from {city} to {city} was {adj}.",
    "The {noun} and the {noun} belonged to the {body}.",
    "Before {month}, no {job} in {country} had seen such a {adj} {noun}.",
    "{person} kept the {color} {object} in the {noun}.",
)


class _Draw(dict):
    """Mapping that draws a fresh word for each name asked of it, so that a template may use a name twice."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def __missing__(self, name: str) -> str:
        if name == "person":
            return person(self.rng)
        if name == "hour":
            return str(self.rng.randrange(1, 13))
        if name == "visitors":
            return str(self.rng.randrange(2, 99))
        return self.rng.choice(_LISTS[name])


_LISTS = {
    "month": MONTH,
    "topic": TOPIC,
    "body": BODY,
    "verb": VERB,
    "adj": ADJECTIVE,
    "noun": NOUN,
    "city": CITY,
    "day": DAY,
    "job": JOB,
    "country": COUNTRY,
    "color": COLOR,
    "object": OBJECT,
}


@dataclass(frozen=True)
class Fact:
    """One sentence with a key and a value, the question that asks for the value and the answer to it."""

    kind: str
    key: str
    sentence: str
    question: str
    answer: str
    value: str


def vocabulary() -> list[str]:
    """All words that must be single tokens."""
    lists = (FIRST, LAST, COUNTRY, CITY, WORDS, VERB, MONTH, DAY, PLACE, COUNT)
    return sorted({word for words in lists for word in words})


def digits(rng: random.Random, count: int) -> str:
    """A string of `count` decimal digits."""
    return "".join(rng.choice("0123456789") for _ in range(count))


def person(rng: random.Random, invented: float = 0.0) -> str:
    """A first and a last name; with probability `invented` one of them is made of syllables nobody has seen."""
    first_name, last = rng.choice(FIRST), rng.choice(LAST)
    if rng.random() < invented:
        invented_name = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3, 3)))).capitalize()
        return f"{invented_name} {last}" if rng.random() < 0.5 else f"{first_name} {invented_name}"
    return f"{first_name} {last}"


def filler(rng: random.Random) -> str:
    """One sentence without any fact that is ever asked."""
    return rng.choice(_FILLER).format_map(_Draw(rng))


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def place_fact(rng: random.Random, place: str, count: str) -> Fact:
    """The four-digit code of a numbered place, for example locker three: an entry of a list."""
    value = digits(rng, 4)
    stem = f"{place} {count}"
    return Fact("place", stem, f"The code of {stem} is {value}.", f"What is the code of {stem}?", f" {value}.", value)


def make_fact(rng: random.Random, kind: str, invented: float = 0.0) -> Fact:
    """A fresh fact of one of FACT_KINDS."""
    if kind == "place":
        return place_fact(rng, rng.choice(PLACE), rng.choice(COUNT))
    if kind == "note":
        key, value = digits(rng, 3), _words(rng, rng.randrange(8, 21))
        return Fact(kind, key, f"Note {key} says {value}.", f"What are the words of note {key}?", f" {value}.", value)
    if kind == "pass":
        key, value, noun = rng.choice(CITY), _words(rng, 3), "password"
    elif kind in ("code", "badge", "born", "job"):
        key = person(rng, invented)
        noun, value = {
            "code": ("access code", digits(rng, 4)),
            "badge": ("badge number", digits(rng, 5)),
            "born": ("birthplace", rng.choice(CITY)),
            "job": ("profession", rng.choice(JOB)),
        }[kind]
    else:
        raise ValueError(f"unknown kind of fact {kind!r}; known: {', '.join(FACT_KINDS)}")
    stem = f"{noun} of {key}"
    return Fact(kind, key, f"The {stem} is {value}.", f"What is the {stem}?", f" {value}.", value)


def make_list(rng: random.Random, items: int) -> tuple[list[Fact], str, str]:
    """A numbered group of places: its facts in order, the question for all of them, the answer."""
    place = rng.choice(PLACE)
    facts = [place_fact(rng, place, count) for count in COUNT[:items]]
    answer = " " + ", ".join(f"{fact.key} is {fact.value}" for fact in facts) + "."
    return facts, f"List the codes of {place} one to {place} {COUNT[items - 1]}.", answer


def make_chain(rng: random.Random, hops: int) -> tuple[list[str], str, str]:
    """An object handed along: one sentence per hop in order, the question for the way, the answer."""
    thing = f"{rng.choice(COLOR)} {rng.choice(OBJECT)}"
    firsts, lasts = rng.sample(FIRST, hops + 1), rng.sample(LAST, hops + 1)
    people = [f"{first_name} {last}" for first_name, last in zip(firsts, lasts, strict=True)]
    steps = [f"from {a} to {b}" for a, b in pairwise(people)]
    question = f"How was the {thing} passed from {people[0]} to {people[-1]}?"
    return [f"The {thing} passed {step}." for step in steps], question, " " + ", ".join(steps) + "."


def ask(question: str) -> str:
    """How a question follows the document."""
    return f"\nQuestion: {question} Answer:"
