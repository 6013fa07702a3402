"""What a stored run ran with, of its recorded facts, as `kvlens.methods.differences` compares it."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from kvlens.lens.knob import COUNTED, KEPT, attends_by, limit_by
from kvlens.methods import FIT, make_parameters
from kvlens.methods.differences import BUDGET, DTYPE, QUESTION, SEED, RunSettings
from kvlens.methods.naming import installed
from kvlens.store.outcomefacts import OutcomeFacts, parameter_texts


def settings_by(facts: OutcomeFacts) -> RunSettings:
    """Return the settings of a run. The parameters by which a method keeps to its limit are the limit's words."""
    method, parameters = str(facts.method), dict(facts.parameters)
    if attends_by(method, facts.sizes) is not None:
        parameters = {name: value for name, value in parameters.items() if name not in (KEPT, COUNTED)}
    preset_values = _preset_texts(method, facts.preset)
    changed = {name for name, value in parameters.items() if name in preset_values and preset_values[name] != value}
    conditions = {
        BUDGET: limit_by(facts),
        QUESTION: facts.question or "in",
        DTYPE: facts.dtype or "",
        SEED: "" if facts.seed is None else str(facts.seed),
    }
    return RunSettings(parameters, frozenset(changed | set(facts.requested)), conditions)


@lru_cache(maxsize=512)
def _preset_texts(method: str, preset: str | None) -> dict[str, str]:
    """Return the parameters of a preset as text; {} where they follow from the prompt, or are not known here."""
    kind = None if preset == FIT else installed(method)
    if kind is None:
        return {}
    try:
        return parameter_texts(dataclasses.asdict(make_parameters(kind, preset, {})))
    except ValueError:
        return {}
