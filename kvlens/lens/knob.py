"""Another budget for the same prompt: which shares a run's method may be asked for. Arithmetic alone, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlens import methods
from kvlens.budget import Budget, in_words, of_run, phrase
from kvlens.meta import RunMeta
from kvlens.metaparts import OBSERVED
from kvlens.methods.fitting import Sizes, choose
from kvlens.runs.memory import attended_share
from kvlens.runs.request import default_preset
from kvlens.shape import KVShape
from kvlens.store.outcomefacts import OutcomeFacts
from kvlens.store.reader import TraceReader
from kvlens.text.units import counted, full_kv

SHARES = (5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100)
"""percent that are offered, where the method can keep to them"""
KEPT = "keep"
"""parameter of methods that keep every token on the device: the share of tokens that is attended; 0: as their other
parameters say"""
COUNTED = "tokens"
"""of these, the one that says how many, where a method has it"""
NOT_RECORDED = "budget not recorded"
"""limit of an observed run: the caller's own code set it"""


def asked_in_words(name: str, value: str) -> str:
    """What is asked for otherwise: 'budget 30%', 'no limit', 'keep 0.3', 'method fair:NAME'."""
    return phrase(in_words(value)) if name == "budget" else f"{name} {value}"


def attending_change(method: str, changed: Mapping[str, str]) -> dict[str, str]:
    """Return what a repeat of a run changes, with a share as its budget as the share of attended tokens, where the rule
    is for the method; another `method` may be among the changes."""
    parameters = {name: value for name, value in changed.items() if name != "budget"}
    share = attended_share(parameters.get("method", method), changed.get("budget"), parameters)
    return dict(changed) if share is None else parameters | {KEPT: f"{share:g}"}


@dataclass(frozen=True)
class Knob:
    """What is asked for otherwise, and which shares of it there are."""

    name: str
    """budget, or the method's parameter that stands for it"""
    own: float
    """percent, of the run"""
    shares: tuple[float, ...]
    """percent, ascending, the run's own among them"""
    was: str = ""
    """what the run's own share comes from, where the parameter does not say it: 'tokens=96'"""

    def value(self, share: float) -> str:
        """As a command takes it."""
        return f"{share:g}%" if self.name == "budget" else f"{share / 100:g}"

    def describe(self, share: float) -> str:
        """'30%', or 'keep 30%'."""
        return f"{share:g}%" if self.name == "budget" else f"{self.name} {share:g}%"

    def choice(self, share: float) -> str:
        """The same where one is chosen: 'keep 20% (as it was)'; 'tokens=96, 10.2% attended (as it was)' where the
        parameter says nothing of the run."""
        if share != self.own:
            return self.describe(share)
        return f"{f'{self.was}, {share:g}% attended' if self.was else self.describe(share)} (as it was)"

    def share(self, value: str) -> float | None:
        """The percent that a command's value is; None where it is no share that is offered."""
        try:
            amount = Budget.parse(value)
        except ValueError:
            return None
        label = round(100 * amount.amount, 1) if amount.unit == "share" else None
        return label if label in self.shares else None


def knob_in(reader: TraceReader) -> Knob | None:
    """Of a stored run; what it attended is read where its parameters do not say it."""
    return knob_of(reader.meta, lambda: _attended(reader))


def knob_of(meta: RunMeta, attended: Callable[[], float | None] = lambda: None) -> Knob | None:
    """None for a method that has no such choice, is not installed here, or an old run that does not say what it was.
    attended(): percent of the tokens that the run attended, asked where no parameter says it; None: not recorded."""
    full, token = meta.full_kv_bytes, meta.token_bytes
    if not (full and token and meta.head_dim and meta.max_new and meta.config):
        return None
    try:
        method = methods.get(str(meta.method))
    except ValueError:
        return None
    prompt = meta.prompt_tokens or max(1, full // token - meta.max_new)
    if method.keeps_all:
        kept_tokens = meta.config.get(KEPT)
        is_known = any(field.name == KEPT for field in dataclasses.fields(method.Parameters))
        if not is_known or not isinstance(kept_tokens, (int, float)):
            return None
        tokens = meta.config.get(COUNTED)
        if kept_tokens:
            return _knob(KEPT, 100 * float(kept_tokens), SHARES)
        if isinstance(tokens, int) and tokens > 0:
            return _knob(KEPT, 100 * tokens / prompt, SHARES, f"{COUNTED}={tokens}")
        visited = attended()
        return None if visited is None else _knob(KEPT, visited, SHARES, "its own parameters")
    request = meta.request or {}
    preset, overrides = request.get("preset", meta.preset), dict(request.get("overrides", meta.config) or {})
    numbers = 2 * meta.layers * meta.kv_heads * meta.head_dim
    shape = KVShape(meta.layers, meta.q_heads, meta.kv_heads, meta.head_dim, token // numbers, meta.windows)
    sizes = Sizes(shape, prompt - 1, meta.max_new, None)
    usual = default_preset(method.name, str(meta.model))

    def possible(share: int) -> bool:
        position = dataclasses.replace(sizes, budget_bytes=None if share >= 100 else full * share // 100)
        try:
            run = choose(method, preset, usual, overrides, position)
        except ValueError:
            return False
        return position.may_hold(method, run.params)

    own_value = 100.0 if meta.budget_bytes is None else 100 * meta.budget_bytes / full
    return _knob("budget", own_value, [share for share in SHARES if possible(share)])


def _knob(name: str, value: float, shares: Any, was: str = "") -> Knob:
    own_rows = round(min(100.0, value), 1)
    return Knob(name, own_rows, tuple(sorted({own_rows, *(float(share) for share in shares)})), was)


def _attended(reader: TraceReader) -> float | None:
    """Percent of the tokens there were, mean over steps, layers and KV heads; None: not recorded."""
    meta = reader.meta
    if not reader.n_steps or meta.prompt_tokens is None or meta.trace_level == "summary":
        return None
    present = meta.prompt_tokens + np.arange(reader.n_steps)
    share = 100 * float(np.mean(reader.kv_cube("attended_tokens").mean((1, 2)) / present))
    return share if share == share else None


def attends(meta: RunMeta) -> str | None:
    """What a method that keeps every token on the device is held to by its parameters: '20% of attended tokens', '96
    attended tokens'. None: by none of these; another method."""
    return attends_by(str(meta.method), meta.config)


def attends_by(name: str, config: Mapping[str, Any]) -> str | None:
    """The same of a method's parameters, before a run."""
    kept_tokens, tokens = config.get(KEPT), config.get(COUNTED)
    if not isinstance(kept_tokens, int | float):
        return None  # of most methods, none of which has to be imported for it
    method = methods.registry().get(name)
    if method is None or not method.keeps_all:
        return None
    if kept_tokens:
        return f"{100 * kept_tokens:g}% of attended tokens"
    return counted(tokens, "attended token") if isinstance(tokens, int) and tokens > 0 else None


def asked_limit(name: str, config: Mapping[str, Any], budget: str | None) -> str:
    """Return what a run that is asked for is held to, as `held_to` says it of a stored one."""
    return attends_by(name, config) or phrase(in_words(budget))


def limit_of(meta: RunMeta) -> str:
    """What a run was held to, the same for '0.2' and '20%': '20%', '20% of attended tokens', 'no limit'."""
    return NOT_RECORDED if meta.observed is not None else attends(meta) or of_run(meta.budget, meta.budget_bytes)


def limit_by(facts: OutcomeFacts) -> str:
    """The same of a run's recorded facts."""
    if facts.method == OBSERVED:
        return NOT_RECORDED
    return attends_by(str(facts.method), facts.sizes) or of_run(facts.budget, facts.budget_bytes)


def limit_with_format(meta: RunMeta) -> str:
    """The same with the number format that a share of full KV is of: '20% of full KV in float32'."""
    limit = limit_of(meta)
    return f"{limit} of {full_kv(meta.dtype)}" if limit.endswith("%") else limit


def held_to(meta: RunMeta) -> str:
    """The same where nothing beside says that it is a budget: 'budget 20%', '20% of attended tokens', 'no limit'."""
    return (
        NOT_RECORDED if meta.observed is not None else attends(meta) or phrase(of_run(meta.budget, meta.budget_bytes))
    )
