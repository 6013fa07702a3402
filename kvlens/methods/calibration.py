"""What a method must know of a model before a run: read and checked here, handed in by the context.

A method touches no file. It says which kinds of figures it needs with which parameters (`Method.calibrations`, of
kvlens/methods/modelfigures.py); what is missing is refused before the model is loaded, what does not fit the model
before the prompt is read.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlens.methods.base import Method
from kvlens.methods.modelfigures import Calibration, Content
from kvlens.methods.run_inputs import RunContext
from kvlens.refusal import Refusal
from kvlens.shape import KVShape


def require(method: type[Method], params: Any, model: str) -> None:
    """Before the model is loaded: raises ValueError with one sentence when figures that the parameters ask for are
    missing."""
    for calibration in method.calibrations:
        if calibration.needed(params):
            calibration.file(method.name, params, model)


def calibrated(method: type[Method], params: Any, context: RunContext) -> RunContext:
    """The context with all that the method asks for. Raises ValueError with one sentence when something is missing or
    does not fit the model."""
    return replace(context, calibration=read_figures(method, params, context.shape, context.model_name))


def read_figures(method: type[Method], params: Any, shape: KVShape, model: str) -> dict[str, Any]:
    """Kind -> figures, of the kinds that the parameters ask for. Raises as `calibrated`."""
    figures = {}
    for calibration in method.calibrations:
        if calibration.needed(params):
            path = calibration.file(method.name, params, model)
            figures[calibration.kind] = _accepted(
                calibration, read(path, calibration.maker or method.name, shape), params, shape, method.name
            )
    return figures


def _accepted(calibration: Calibration, content: Content, params: Any, shape: KVShape, name: str) -> Any:
    try:
        return calibration.accept(content, params, shape)
    except (KeyError, TypeError, AttributeError):
        raise Refusal(
            f"'{content.name}' does not hold {calibration.kind} for {name}.", code="other_file", file=content.name
        ) from None


def read(path: Path, method: str, shape: KVShape) -> Content:
    """A calibration file of `method` for a model of this size. Raises ValueError with one sentence when it is not
    one."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        beside = path.with_suffix(".json")
        try:
            return Content(path.name, load_file(path), json.loads(beside.read_text()) if beside.exists() else {})
        except (SafetensorError, ValueError):
            raise ValueError(f"'{path.name}' is not a file of tensors for {method}.") from None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        origin = content["provenance"]
        sizes = (origin["layers"], origin["q_heads"])
    except (ValueError, KeyError, TypeError):
        raise Refusal(
            f"'{path.name}' is not a calibration made by `kvlens calibrate {method}`.", code="other_file"
        ) from None
    if content.get("method") != method:
        raise ValueError(f"'{path.name}' calibrates {content.get('method')}, not {method}.")
    if sizes != (shape.layers, shape.q_heads):
        raise Refusal(
            f"'{path.name}' was made for {sizes[0]} layers of {sizes[1]} query heads, this model has {shape.layers} of "
            f"{shape.q_heads}: run `kvlens calibrate {method} --model M` for it.",
            code="other_model",
        )
    return Content(path.name, dict(content), dict(origin))
