"""Composed methods: a name joins parts that methods lend (kvlens/methods/wrappers.py).

NAME    = EVICTION [ '+' STORAGE ] | METHOD '@' TRIGGER
EVICTION = [ PART ':' ]... METHOD

PART decides units or weighs scores, METHOD scores, STORAGE holds what stays, TRIGGER decides when to select anew. The
part nearest to METHOD acts first. A composed method has the parameters of all of its parts and is run, recorded and
explained as any other. What makes no sense is refused with a code and the reason.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from kvlens.methods.kvpress import PREFIX
from kvlens.methods.wrappers import Lent

if TYPE_CHECKING:
    from kvlens.methods.base import Method

UNKNOWN_PART = "composition_unknown_part"
"""no method lends a part of that name there"""
SENSELESS = "composition_senseless"
"""the part and the method do not go together"""
LONGEST = 64
"""characters of a composed name: it becomes part of file names and addresses"""
PLACES = {
    "front": ("PART:METHOD", "in front of a colon"),
    "storage": ("METHOD+PART", "behind a plus"),
    "trigger": ("METHOD@PART", "behind an at sign"),
}
"""field of Lending -> form of the name, and where the part is in it"""

Get = Callable[[str], type["Method"]]


class NoComposition(ValueError):
    """A composed name that is refused: one sentence, with a code and the values behind it."""

    def __init__(self, code: str, name: str, part: str, reason: str) -> None:
        """code: UNKNOWN_PART or SENSELESS; part: of the name; reason: a clause without a full stop."""
        self.code, self.name, self.part, self.reason = code, name, part, reason
        self.values = {"part": part, "reason": reason}
        super().__init__(f"'{name}' cannot be composed: {reason}.")


def is_composed(name: str) -> bool:
    """Return True if a name has the form of a composition; a press's name alone has not."""
    return any(sign in name.removeprefix(PREFIX) for sign in ":+@")


@cache
def composed(name: str, get: Get, methods: tuple[type[Method], ...]) -> type[Method]:
    """Return the class of a composed name. get: class of a plain name; methods: those that may lend a part. Raises
    NoComposition, and what `get` raises."""
    if len(name) > LONGEST:
        raise NoComposition(UNKNOWN_PART, name, name, f"it has more than {LONGEST} characters")
    if not all(re.split("[:+@]", name.removeprefix(PREFIX))):
        raise NoComposition(UNKNOWN_PART, name, "", "a part of it has no name")
    lent = {
        place: {part.word: part for method in methods if (part := getattr(method.lends, place)) is not None}
        for place in PLACES
    }
    base, behind, word = name.partition("+")
    place = "storage"
    if not behind:
        base, behind, word = name.partition("@")
        place = "trigger"
    if behind:
        part = _find(lent, place, name, word)
        return _join(name, part, get(base) if not is_composed(base) else composed(base, get, methods), place)
    word, _, rest = base.partition(":")
    part = _find(lent, "front", name, word)
    method = composed(rest, get, methods) if is_composed(rest) else get(rest)
    return _join(name, part, method, "front")


def _find(lent: dict[str, dict[str, Lent]], place: str, name: str, word: str) -> Lent:
    """Return the part of that word. Raises NoComposition with the words that there are."""
    if word in lent[place]:
        return lent[place][word]
    words = ", ".join(lent[place]) or "none"
    matches = [field for field in PLACES if word in lent[field]]
    more = f" ({word} is written {PLACES[matches[0]][0].replace('PART', word)})" if matches else ""
    raise NoComposition(UNKNOWN_PART, name, word, f"there is no part '{word}' {PLACES[place][1]}: {words}{more}")


def _join(name: str, part: Lent, method: type[Method], place: str) -> type[Method]:
    """Return the class of a part over a method. Raises NoComposition where they do not go together."""
    if reason := part.refuses(method):
        raise NoComposition(SENSELESS, name, part.word, f"{part.word} does not go with {method.name}, since {reason}")
    parameters = dataclasses.make_dataclass(
        f"{part.hooks.__name__}{method.Parameters.__name__}",
        [],
        bases=(part.parameters, method.Parameters),
        frozen=True,
        namespace={"__doc__": method.Parameters.__doc__},
    )
    parameters.__qualname__ = f"parameters of {name}"
    form = {"front": "{word}:{title}", "storage": "{title}+{word}", "trigger": "{title}@{word}"}[place]
    calibrations = [*getattr(part.hooks, "calibrations", ())]
    calibrations += [
        dataclasses.replace(figures, maker=figures.maker or _maker(method)) for figures in method.calibrations
    ]
    namespace = {
        "__module__": __name__,
        "__doc__": f"{method.__doc__}\n\nWith {part.word}: {part.adds}. {part.hooks.__doc__}",
        "name": name,
        "title": form.format(title=method.title, word=part.word),
        "summary": f"{method.summary}; {part.adds}",
        "Parameters": parameters,
        "presets": dict(method.presets),
        "untrained": {**method.untrained, **getattr(part.hooks, "untrained", {})},
        "needs": dataclasses.replace(method.needs, **part.needs),
        "journal_names": {**method.journal_names, **getattr(part.hooks, "journal_names", {})},
        "calibrations": tuple(calibrations),
        "lends": type(method.lends)(),
        "parts": (part.hooks, *getattr(method, "parts", (method,))),
    }
    return type(f"{part.hooks.__name__}{method.__name__}", (part.hooks, method), namespace)


def innermost(method: type[Method]) -> type[Method]:
    """Return the method that a composed one is built on; a plain method itself."""
    parts: tuple[type[Method], ...] = getattr(method, "parts", (method,))
    return parts[-1]


def _maker(method: type[Any]) -> str:
    """Return the method whose figures a composed one reads: the innermost one."""
    return str(innermost(method).name)
