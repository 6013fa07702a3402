"""What a method is called for one run: its title, and in brackets what of it is an untrained or uncalibrated stand-in.

A method that was published with trained or calibrated parts is not that method while a part is a stand-in, so lists,
pages, tables and exports name the stand-in wherever they name the method. This module alone makes the name. No torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvlens.methods import FIT, UnknownMethod, entry, get, make_parameters
from kvlens.methods.composition import NoComposition
from kvlens.methods.fitting import stand_ins, trained_parts
from kvlens.methods.kvpress import NoPress

if TYPE_CHECKING:
    from kvlens.meta import RunMeta
    from kvlens.methods.base import Method


def stand_in(method: str, config: Mapping[str, Any]) -> str:
    """Return the untrained or uncalibrated parts of a method under these parameters ('untrained router'), joined by
    commas; '' if there are none, or if the method is not installed here."""
    kind = installed(method)
    return "" if kind is None else stand_ins(kind, config)


def titled(title: str, stand_in_words: str | None) -> str:
    """Return a title with the words of `stand_in` in brackets: 'Method (untrained part)'."""
    return f"{title} ({stand_in_words})" if stand_in_words else title


def display_name(method: str, config: Mapping[str, Any]) -> str:
    """Return what a method is called under these parameters; its bare name if it is not installed here."""
    kind = installed(method)
    return titled(method if kind is None else kind.title, stand_in(method, config))


def preset_name(
    method: str, preset: str | None, overrides: Mapping[str, Any] | None = None, usual: str | None = None
) -> str:
    """Return what a method is called under a preset and parameters that differ from it. The preset `fit` sizes a method
    and takes the trained parts of the preset `usual`, the model's own; without `usual` it counts as the defaults. A
    preset or parameter that does not exist counts for nothing."""
    kind = installed(method)
    if kind is None:
        return method
    parts = trained_parts(kind, usual) if preset == FIT else {}
    try:
        params = make_parameters(kind, preset, {**parts, **(overrides or {})})
    except ValueError:
        return kind.title
    return display_name(method, dataclasses.asdict(params))


def recorded_stand_in(row: Mapping[Any, Any]) -> str:
    """Return the stand-ins of a run's method, of a row of `store.catalog.list_runs`. A run.json from before kvlens
    recorded them has no number format either: its preset says what was untrained."""
    method, words = row.get("method"), row.get("stand_in")
    if isinstance(words, str) or isinstance(row.get("dtype"), str) or not isinstance(method, str):
        return words if isinstance(words, str) else ""
    kind, preset = installed(method), row.get("preset")
    if kind is None:
        return ""
    try:
        params = make_parameters(kind, preset if isinstance(preset, str) else None, {})
    except ValueError:
        return ""
    return stand_in(method, dataclasses.asdict(params))


def run_name(meta: RunMeta) -> str:
    """Return what a stored run's method is called, by the parameters that it ran with. A method that is not installed
    here is called by its name, and by what its run recorded."""
    method = str(meta.method)
    return titled(display_name(method, meta.config), meta.stand_in if installed(method) is None else "")


def code_name(meta: RunMeta) -> str:
    """Return a stored run's method by the name that `--method` takes, its stand-ins in brackets."""
    method = str(meta.method)
    return titled(method, stand_in(method, meta.config))


def installed(method: str) -> type[Method] | None:
    """Return the class of a method, a press or a composition; None if it is not installed here."""
    try:
        return get(method)
    except (UnknownMethod, NoPress, NoComposition):
        return None


def installed_entry(method: str) -> dict[str, Any] | None:
    """Return what the catalogue says of a method, a press or a composition; None if it is not installed here."""
    return None if installed(method) is None else entry(method)


def refusal_of(method: str) -> str:
    """Return the sentence with which a method's name is refused; '' if it is installed here."""
    try:
        get(method)
    except (UnknownMethod, NoPress, NoComposition) as problem:
        return str(problem)
    return ""
