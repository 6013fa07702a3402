"""Methods of a race, as the command line names them."""

from __future__ import annotations

from typing import Any

from kvlens.refusal import Refusal
from kvlens.runs.races import Entrant


def entrants(names: str, presets: list[str], values: list[str]) -> tuple[Entrant, ...]:
    """'a,b', ['b:paper'], ['a:window=8'] -> the entrants. A method named twice has its first preset first. A parameter
    that is given once holds for all entrants of the method; given once for each entrant, in their order, where an empty
    value leaves it as it is. Raises ValueError with one sentence."""
    rows = [name.strip() for name in names.split(",") if name.strip()]
    preset: dict[str, list[str]] = {}
    overrides: dict[str, dict[str, list[str]]] = {}
    for item in presets:
        name, sign, value = item.rpartition(":")
        if not sign or name not in rows:
            raise ValueError(f"--preset takes method:preset of a method of the race, not '{item}'.")
        preset.setdefault(name, []).append(value)
    for item in values:
        total, sign, value = item.partition("=")
        name, colon, parameter = total.rpartition(":")
        if not sign or not colon or name not in rows:
            raise ValueError(f"--set takes method:parameter=value of a method of the race, not '{item}'.")
        overrides.setdefault(name, {}).setdefault(parameter.strip(), []).append(value)
    for name, texts in preset.items():
        if len(texts) > rows.count(name):
            raise Refusal(
                f"--preset names {len(texts)} presets of {name}: give one for each time that --methods names {name}.",
                code="set_twice",
                name=name,
            )
    return tuple(
        Entrant(
            method=name,
            preset=preset[name].pop(0) if preset.get(name) else None,
            overrides=_nth(name, rows[:place].count(name), rows.count(name), overrides.get(name, {})),
        )
        for place, name in enumerate(rows)
    )


def _nth(method: str, place: int, count: int, values: dict[str, list[str]]) -> dict[str, Any]:
    """Return the parameters of the entrant `place` of the `count` entrants of a method."""
    for parameter, items in values.items():
        if len(items) not in (1, count):
            raise ValueError(
                f"--set {method}:{parameter} is given {len(items)} times and {method} is named {count} times: give it "
                "once, or once for each."
            )
    pairs = {parameter: items[0 if len(items) == 1 else place] for parameter, items in values.items()}
    return {parameter: value for parameter, value in pairs.items() if value or len(values[parameter]) == 1}
