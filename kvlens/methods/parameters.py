"""A method's parameters: how their dataclass fields are declared, shown in lists and forms, and read from text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlens.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvlens.methods.base import Method

SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
"""how a parameter that is on or off may be written"""
FIT = "fit"
"""the preset that is computed for a prompt and a budget (kvlens.methods.fitting); every method has it"""


def param(default: Any, doc: str, *, symbol: str = "", choices: Sequence[Any] = (), ours: bool = False) -> Any:
    """A field of a method's parameters. `ours` marks a decision of ours where the paper is silent or contradicts
    itself."""
    return field(default=default, metadata={"doc": doc, "symbol": symbol, "choices": tuple(choices), "ours": ours})


def finer_param() -> Any:
    """The field of a quantised method for sides of KV heads with bits of their own (kvlens/finer.py)."""
    return param(
        "",
        "keys (K) or values (V) of a layer or KV head in other bits, or exact without bits, comma-separated: "
        "'L7.KV1.K, L3.V:4'; empty: none",
        ours=True,
    )


@dataclass(frozen=True)
class MethodInfo:
    """A method as the command line and the forms show it."""

    name: str
    title: str
    paper: str
    summary: str
    family: str
    parameters: list[dict[str, Any]]
    presets: dict[str, dict[str, Any]]
    journal_names: dict[str, str]
    keeps_all: bool
    fit: str
    """how the preset `fit` is computed"""
    trained: list[str]
    """figures of the model that are trained or calibrated, each with the models that they are shipped for; []: none"""


def describe(method: type[Method], fit: str) -> MethodInfo:
    """Read a method's parameters from its dataclass; fit: how its preset of that name is computed."""
    return MethodInfo(
        method.name,
        method.title,
        method.paper,
        method.summary,
        method.family,
        [_describe(f) for f in dataclasses.fields(method.Parameters)],
        {name: dict(values) for name, values in method.presets.items()},
        dict(method.journal_names),
        method.keeps_all,
        fit,
        [f"{figures.kind} ({', '.join(figures.shipped) or 'no model'})" for figures in method.calibrations],
    )


def _describe(f: dataclasses.Field[Any]) -> dict[str, Any]:
    choices = list(f.metadata.get("choices", ()))
    kind = "choice" if choices else type(f.default).__name__
    return {
        "name": f.name,
        "type": kind,
        "default": f.default,
        "choices": choices,
        "doc": f.metadata.get("doc", ""),
        "symbol": f.metadata.get("symbol", ""),
        "ours": f.metadata.get("ours", False),
    }


def make_parameters(method: type[Method], preset: str | None, overrides: dict[str, str | Any]) -> Any:
    """Parameters from the defaults, a preset and overrides (text is converted to the field's type). The preset `fit`
    adds nothing here: what it came to for a run is among the run's overrides.

    Raises ValueError with one sentence for an unknown preset or parameter, or a value of the wrong kind.
    """
    values: dict[str, Any] = {}
    if preset and preset != FIT:
        if preset not in method.presets:
            preset_names = ", ".join([*sorted(method.presets), FIT])
            raise Refusal(
                f"{method.name} has no preset '{preset}'; its presets: {preset_names}.",
                code="unknown_preset",
                preset=preset,
            )
        values.update(method.presets[preset])
    values.update(converted(method, overrides))
    try:
        return method.Parameters(**values)
    except ValueError as error:
        raise Refusal(
            f"{method.name}: {error}", code=getattr(error, "code", ""), **getattr(error, "values", {})
        ) from None


def check_parameters(method: type[Method], preset: str | None, overrides: Mapping[str, str | Any]) -> Any | None:
    """Return the parameters that are known before a prompt is; None under the preset `fit`, which chooses its numbers
    for a prompt. Raises ValueError as `make_parameters`."""
    if preset == FIT:
        converted(method, overrides)
        return None
    return make_parameters(method, preset, dict(overrides))


def converted(method: type[Method], overrides: Mapping[str, str | Any]) -> dict[str, Any]:
    """Overrides in the types of their fields. Raises ValueError as `make_parameters`; whether they go together is not
    asked."""
    fields = {f.name: f for f in dataclasses.fields(method.Parameters)}
    for key in overrides:
        if key not in fields:
            raise ValueError(f"{method.name} has no parameter '{key}'; it has: {', '.join(fields) or 'none'}.")
    return {key: _convert(method.name, fields[key], value) for key, value in overrides.items()}


TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
"""type of a parameter -> what messages call a value of it"""


def _wrong_type(method: str, parameter: str, kind: type, value: Any) -> Refusal:
    return Refusal(
        f"{method}: {parameter} takes {TYPES[kind]}, not '{value}'.",
        code="parameter_type",
        parameter=parameter,
        takes=kind.__name__,
        value=value,
    )


def _convert(method: str, f: dataclasses.Field[Any], value: Any) -> Any:
    choices = f.metadata.get("choices", ())
    kind: Any = type(f.default)
    if kind is str and isinstance(value, bool) and choices:
        value = str(value).lower()  # of a run that was stored when this was a switch
    if isinstance(value, str) and kind is not str:
        text = value.strip().lower()
        try:
            value = SWITCH[text] if kind is bool else kind(text)
        except (KeyError, ValueError):
            raise _wrong_type(method, f.name, kind, value) from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise _wrong_type(method, f.name, kind, value)
    if choices and value not in choices:
        raise Refusal(
            f"{method}: parameter '{f.name}' is one of {', '.join(map(str, choices))}, not '{value}'.",
            code="not_a_choice",
            parameter=f.name,
            choices=choices,
        )
    return value
