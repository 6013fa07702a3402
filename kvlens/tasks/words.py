"""Words and names of the tasks for any tokenizer, and how they are drawn. Own lists."""
# ruff: noqa: SIM905 (word lists read better as text)

from __future__ import annotations

import random
import uuid

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
FIRST_NAMES = (
    "Ada Albert Alma Arthur Bertha Cecil Clara Daniel Dora Edgar Edith Ernest Flora Frank George Hanna Harold Helen "
    "Henry Ida Irene Jacob Julia Karl Laura Leon Lydia Martin Maud Nora Oscar Otto Paula Ralph Rosa Samuel Sylvia "
    "Thomas Vera Walter"
).split()
SURNAMES = (
    "Abbott Ainsley Barlow Bishop Carver Chandler Crane Dalton Draper Fairfax Fenton Garland Hale Harding Holt Ingram "
    "Jarvis Keller Lambert Lowell Marsh Mercer Norwood Oakley Palmer Penrose Quincy Radford Sawyer Shelby Stanton "
    "Tanner Thorne Upton Vance Walton Webster Whitfield Winslow Yates"
).split()
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def pair(rng: random.Random) -> str:
    """An adjective and a noun, such as 'amber lantern': a key or a value."""
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def people(rng: random.Random, count: int) -> list[str]:
    """First names and surnames, such as 'Clara Whitfield'; no two people share either."""
    drawn = zip(rng.sample(FIRST_NAMES, count), rng.sample(SURNAMES, count), strict=True)
    return [f"{start} {last}" for start, last in drawn]


def distinct(rng: random.Random, count: int, draw: str = "pair") -> list[str]:
    """`count` different pairs ('pair'), five-digit numbers ('number'), five capital letters ('name'), made-up words
    ('word'), coded words ('coded') or identifiers ('identifier')."""
    makers = {"pair": pair, "number": number, "name": name, "word": word, "coded": coded, "identifier": identifier}
    mapping: dict[str, None] = {}
    while len(mapping) < count:
        mapping[makers[draw](rng)] = None
    return list(mapping)


def number(rng: random.Random) -> str:
    """Five digits."""
    return str(rng.randrange(10_000, 100_000))


def name(rng: random.Random) -> str:
    """Five capital letters."""
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5))


def word(rng: random.Random) -> str:
    """Two to four made-up syllables; there are hundreds of thousands of such words."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 3, 3, 4))))


def coded(rng: random.Random) -> str:
    """Six small letters."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(6))


def identifier(rng: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
