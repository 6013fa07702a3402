"""The preset `fit`: a method's parameters for a prompt, a model's sizes and a budget, by the proportions of its paper.

A paper's numbers are made for its own models and contexts: a window of 512 tokens is 2 % of a prompt of 32K and more
than half of one of 900. A method's parameters may have two class methods, both by arithmetic alone:

- `fit(shape, prompt_tokens, max_new, budget_bytes) -> dict`: values over the defaults; the rule and its source are in
  its docstring. A method without one runs with its defaults. `prompt_tokens`, here and below, are those that prefill
  covers, one fewer than the prompt has: an eighth of the prompt is (prompt_tokens + 1) / 8.
- `misfit(prompt_tokens) -> str | None`: why these parameters make no sense for a prompt of that length though the
  bytes suffice, in a few words; None: they do.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvlens.methods.parameters import FIT, converted, make_parameters
from kvlens.shape import KVShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlens.methods.base import Method

SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)
"""of the budget, for which a rule is asked in turn until what it says can be held"""
BY_BUDGET = "as many as the budget holds"
_ZERO = "0: as many"
"""in the text of a parameter whose 0 leaves the number to the budget"""
MARGIN = 0.95
"""share of the budget that a floor may take where it is an estimate, since the text decides"""


@dataclass(frozen=True)
class Sizes:
    """What decides whether parameters fit."""

    shape: KVShape
    prompt_tokens: int
    """tokens that prefill covers: the prompt without its last token"""
    max_new: int
    budget_bytes: int | None
    """None: no limit"""

    @property
    def full_kv_bytes(self) -> int:
        return self.shape.full_kv_bytes(self.prompt_tokens + 1 + self.max_new)

    def floor(self, method: type[Method], params: Any) -> int:
        """Least bytes with these parameters under this budget, exact or by estimate as the method says."""
        windows = self.window_bytes(method)
        remaining = None if self.budget_bytes is None else max(0, self.budget_bytes - windows)
        return method.likely_bytes(params, *self.run(method), remaining) + windows

    def least(self, method: type[Method], params: Any) -> int:
        """Return the bytes that no text of this length goes below with these parameters."""
        return method.bound_bytes(params, *self.run(method)) + self.window_bytes(method)

    def may_hold(self, method: type[Method], params: Any) -> bool:
        """Return whether some text of this length fits the budget with these parameters."""
        return self.budget_bytes is None or self.least(method, params) <= self.budget_bytes

    def run(self, method: type[Method]) -> tuple[KVShape, int, int]:
        """What a method's arithmetic takes besides its parameters: the layers on which it acts, and tokens."""
        shape = self.shape.bound(self.prompt_tokens + self.max_new)
        return shape.acting(method.family == "reference"), self.prompt_tokens, self.max_new

    def window_bytes(self, method: type[Method]) -> int:
        """Return the device bytes of the layers on which the method does not act."""
        tokens = self.prompt_tokens + self.max_new
        return self.shape.bound(tokens).window_bytes(tokens, method.family == "reference")


@dataclass(frozen=True)
class Chosen:
    """The parameters of a run, and how they came to be."""

    preset: str | None
    params: Any
    fitted: dict[str, Any]
    """what the preset `fit` came to; empty under another one"""
    floor: int
    """least bytes with these parameters"""
    said: str | None = None
    """one sentence where `fit` is run: why, and what it came to"""


def trained_parts(method: type[Method], usual: str | None) -> dict[str, Any]:
    """Return the parameters of the preset `usual` that select a trained or calibrated part: {'router': 'trained'}. The
    preset `fit` sets sizes alone, so it takes these parts with them."""
    preset = method.presets.get(usual or "", {})
    return {name: preset[name] for name, value in method.untrained.items() if preset.get(name, value) != value}


def stand_ins(method: type[Method], config: Mapping[str, Any]) -> str:
    """Return the untrained or uncalibrated parts of a method under these parameters ('untrained router'), joined by
    commas; '' if there are none."""
    return ", ".join(
        method.stand_ins.get(parameter, f"uncalibrated {parameter}")
        for parameter, value in method.untrained.items()
        if config.get(parameter) == value
    )


def parts_as_run(method: type[Method], usual: str | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a stored run's config has for the trained parts of the preset `usual`, so that the run is
    repeated with its own: a run from before the model had them was untrained."""
    return {name: config[name] for name in trained_parts(method, usual) if name in config}


def fitted(method: type[Method], sizes: Sizes, usual: str | None = None) -> dict[str, Any]:
    """Values of the preset `fit` over the method's defaults, with the trained parts of the preset `usual`. Where what
    the rule says needs more than the budget, the rule is asked again for a smaller one; where nothing can be held, the
    least is taken."""
    rule, parts = getattr(method.Parameters, "fit", None), trained_parts(method, usual)
    if rule is None:
        return parts
    budget = sizes.budget_bytes
    room = budget if budget is None or method.floor_is_exact else int(MARGIN * budget)
    fits: list[tuple[int, dict[str, Any]]] = []
    for share in SHARES:
        allowed_bytes = None if budget is None else max(0, int(share * budget) - sizes.window_bytes(method))
        values = dict(rule(*sizes.run(method), allowed_bytes)) | parts
        floor = sizes.floor(method, make_parameters(method, None, values))
        if room is None or floor <= room:
            return values
        fits.append((floor, values))
    return min(fits, key=lambda pair: pair[0])[1]


def choose(
    method: type[Method], preset: str | None, usual: str | None, overrides: Mapping[str, Any], sizes: Sizes
) -> Chosen:
    """The parameters of a run. preset None: `usual`, and `fit` where the numbers of that one do not fit; neither
    fits: the one that needs less. Raises ValueError with one sentence as `make_parameters`."""
    named = usual if preset in (None, FIT) else preset
    plain: Chosen | None = None
    try:
        params = make_parameters(method, named, dict(overrides))
        plain = Chosen(named, params, {}, sizes.floor(method, params))
    except ValueError:
        if preset != FIT:
            raise
    why = "" if plain is None else _why_not(method, plain, sizes)
    if plain is not None and preset != FIT and (preset is not None or not why):
        return plain
    values = fitted(method, sizes, usual)
    fit = make_parameters(method, None, {**values, **overrides})
    floor, limit = sizes.floor(method, fit), sizes.budget_bytes
    if plain is not None and preset is None and limit is not None and max(limit, plain.floor) < floor:
        return plain
    fitted_values = {f.name: getattr(fit, f.name) for f in dataclasses.fields(fit)}
    usually = {f.name: f.default for f in dataclasses.fields(fit)}
    came = {
        f.name: BY_BUDGET if value == 0 and _ZERO in f.metadata.get("doc", "") else value
        for f in dataclasses.fields(fit)
        if (value := fitted_values[f.name]) != usually[f.name] or f.name in values
    }
    neither = _misfit(fit, sizes)
    if neither is not None:
        too = " either" if plain is not None and _misfit(plain.params, sizes) else ""
        neither = f", which does not fit this prompt{too} ({neither})"
    sentence = f"{why}running preset {FIT}{neither or ''}: {listed(came) or 'the defaults'}."
    return Chosen(FIT, fit, values, floor, sentence[0].upper() + sentence[1:])


def with_changes(method: type[Method], choice: Chosen, changes: Mapping[str, Any]) -> Chosen:
    """Return the same parameters but for `changes`, so that two arms differ in nothing else. Raises ValueError with one
    sentence for what the method does not take."""
    if not changes:
        return choice
    values = converted(method, changes)
    return replace(choice, params=replace(choice.params, **values), fitted={**choice.fitted, **values})


def _why_not(method: type[Method], chosen: Chosen, sizes: Sizes) -> str:
    """Why parameters do not fit, to go before another clause; '' where they do."""
    limit, full = sizes.budget_bytes, sizes.full_kv_bytes
    if limit is not None and chosen.floor > limit:
        about = "" if method.floor_is_exact else "about "
        need = f"need {about}{chosen.floor / full:.1%} of full KV, the budget is {limit / full:.1%}"
        return f"{describe_preset(chosen.preset)} {need}; "
    misfit = _misfit(chosen.params, sizes)
    return "" if misfit is None else f"{describe_preset(chosen.preset)} do not fit this prompt ({misfit}); "


def _misfit(params: Any, sizes: Sizes) -> str | None:
    """Why parameters make no sense for a prompt of that length; None: they do."""
    check = getattr(params, "misfit", None)
    return None if check is None else check(sizes.prompt_tokens)


def rule_of(method: type[Method]) -> str:
    """What the preset `fit` does, as the rule's docstring says it, on one line."""
    rule = getattr(method.Parameters, "fit", None)
    docstring = inspect.getdoc(rule) if rule is not None else None
    return " ".join((docstring or "The defaults: nothing in them depends on the prompt's length.").split())


def describe_preset(preset: str | None) -> str:
    """The numbers of a preset, in words."""
    return "the paper's numbers" if preset in (None, "paper") else f"the numbers of preset {preset}"


def listed(values: Mapping[str, Any]) -> str:
    """Parameters and their values in words: 'window 64, sinks 4'."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def tokens_within(shape: KVShape, budget_bytes: int | None, tokens: int) -> int:
    """Tokens whose full KV a budget holds, of `tokens` at most."""
    return tokens if budget_bytes is None else min(tokens, budget_bytes // shape.token_bytes)


def prompt_kept(method: type[Method], params: Any, sizes: Sizes) -> int | None:
    """Return how many prompt tokens each KV head keeps at most, on average, under a method that evicts when prefill
    ends: it reserves the KV of all new tokens before. None for another method and without a budget."""
    total = getattr(method, "total", None)
    if total is None or sizes.budget_bytes is None:
        return None
    shape, prompt_tokens, max_new = sizes.run(method)
    budget = max(0, sizes.budget_bytes - sizes.window_bytes(method))
    run = SimpleNamespace(shape=shape, prompt_tokens=prompt_tokens, max_new=max_new, budget_bytes=budget)
    return int(total(params, run) // shape.layers)


def clamp(value: float, least: int, most: int) -> int:
    """The whole number below `value`, within [least, most]."""
    return max(least, min(most, int(value)))
