"""Words, names and filler sentences of the tasks for any tokenizer. Own lists; nothing here states a fact that is ever
asked."""
# ruff: noqa: SIM905 (word lists read better as text)

from __future__ import annotations

import random

ADJECTIVES = (
    "amber ancient bitter bold brisk calm clever coastal copper crooked dusty eager early faded fair feather "
    "gentle gilded grand hollow "
    "honest humble iron ivory jagged keen lively lonely lucky mellow misty narrow noble northern odd olive "
    "pale patient polished proud "
    "quiet rapid restless rough rustic salty scarlet secret shallow silent silver slender smooth solar steady "
    "stormy sudden swift tidy "
    "velvet violet wandering warm weary wild windy wooden young"
).split()
NOUNS = (
    "anchor apple arrow badger barrel basket beacon bell bishop blanket bottle bridge bucket butter candle "
    "canyon carpet castle cherry "
    "chimney cloud comet cottage cricket crown curtain dolphin dragon drum eagle ember engine falcon feather "
    "fiddle forest fountain "
    "garden glacier hammer harbor hazel helmet heron island jacket kettle ladder lantern lemon lizard magnet "
    "maple marble meadow mirror "
    "mountain needle orchard otter paddle pebble pepper piano pillow pocket prairie quarry rabbit raven ribbon "
    "river saddle sailor "
    "shadow shovel signal spider spoon stable statue summit temple thistle tiger timber tunnel turtle valley "
    "violin wagon walnut whistle "
    "willow window zebra"
).split()
PLACES = (
    "harbor market library station orchard museum workshop theatre bakery chapel courtyard lighthouse "
    "mill square tavern"
).split()
PEOPLE = (
    "baker captain clerk doctor farmer gardener guard judge miner nurse painter pilot sailor smith "
    "tailor teacher weaver"
).split()
TIMES = "spring summer autumn winter morning evening dawn noon".split()
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"

_SENTENCES = (
    "In the {time} the {person} walked past the {place} without a word.",
    "The {adjective} {noun} stood beside the {place} for many years.",
    "Nobody at the {place} remembered who had brought the {noun}.",
    "The {person} painted the {noun} and the {person} repaired the {noun}.",
    "After the rain the {place} looked {adjective} and rather empty.",
    "A {person} told a long story about a {adjective} {noun}.",
    "Every {time} the {place} was full of people who talked about the weather.",
    "The {noun} was heavier than the {noun}, or so the {person} believed.",
    "They carried the {adjective} {noun} from the {place} to the {place}.",
    "It was a {adjective} {time}, and the {person} stayed at the {place}.",
)


def pair(rng: random.Random) -> str:
    """An adjective and a noun, such as 'amber lantern': a key or a value."""
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def distinct(rng: random.Random, count: int, draw: str = "pair") -> list[str]:
    """`count` different pairs ('pair'), seven-digit numbers ('number'), five capital letters ('name') or made-up words
    ('word')."""
    makers = {"pair": pair, "number": number, "name": name, "word": word}
    found: dict[str, None] = {}
    while len(found) < count:
        found[makers[draw](rng)] = None
    return list(found)


def number(rng: random.Random) -> str:
    """Seven digits."""
    return str(rng.randrange(1_000_000, 10_000_000))


def name(rng: random.Random) -> str:
    """Five capital letters."""
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5))


def word(rng: random.Random) -> str:
    """Two to four made-up syllables; there are hundreds of thousands of such words."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 3, 3, 4))))


def sentence(rng: random.Random) -> str:
    """One sentence of filler."""
    return _fill(rng.choice(_SENTENCES), rng)


def _fill(template: str, rng: random.Random) -> str:
    lists = {"{time}": TIMES, "{person}": PEOPLE, "{place}": PLACES, "{noun}": NOUNS, "{adjective}": ADJECTIVES}
    for mark, words in lists.items():
        while mark in template:
            template = template.replace(mark, rng.choice(words), 1)
    return template
