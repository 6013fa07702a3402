"""What can be refused of a study's arm before a prompt is read or anything is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvlens import methods
from kvlens.methods.parameters import check_parameters
from kvlens.runs.request import RunRequest, default_preset


def check_arm(request: RunRequest, changes: Mapping[str, Any]) -> None:
    """Raise ValueError with one sentence for a preset or a parameter that an arm's method does not take.

    Args:
        request: the arm's run.
        changes: parameters that are set after the preset was chosen.
    """
    method = methods.get(request.method)
    preset = request.preset or default_preset(request.method, request.model)
    params = check_parameters(method, preset, request.overrides)
    values = methods.converted(method, changes)
    if params is not None and values:
        replace(params, **values)
