"""On what a measurement was made, and what makes two trials comparable."""

from __future__ import annotations

import hashlib
import json
import time
from functools import cache
from pathlib import Path
from typing import Any

from kvlens import __version__, methods
from kvlens.bench.trials import settings
from kvlens.runs.machine import machine


@cache
def weights(model: str) -> str:
    """SHA-256 of a local model's safetensors in order; of nothing for a hub id that is not a folder."""
    from kvlens.engine.models import resolve

    found = hashlib.sha256()
    for path in sorted(Path(resolve(model)).glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


def origin(model: str, name: str, *more: Any) -> str:
    """What makes trials of a method comparable: the model's weights, the method's parameters with its preset, and
    `more`."""
    method = methods.get(name)
    parameters = methods.make_parameters(method, settings(method, model, "")[0], {})
    return hashlib.sha256(json.dumps([model, weights(model), *more, repr(parameters)]).encode()).hexdigest()[:16]


def about(names: tuple[str, ...], model: str) -> dict[str, Any]:
    """Versions, machine and date, and the preset of each method."""
    import torch
    import transformers

    return {
        "kvlens": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "presets": {name: settings(methods.get(name), model, "")[0] for name in names},
    }
