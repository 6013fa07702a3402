"""Where a calibration comes from: stored beside its figures, and checked before they are used."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from kvlens.engine.models import LoadedModel
from kvlens.runs.machine import machine


def provenance(loaded: LoadedModel, **more: Any) -> dict[str, Any]:
    """Model, its sizes, versions, machine and date; `more`: prompts, seeds, settings."""
    import torch
    import transformers

    shape = loaded.shape
    return {
        "model": loaded.name,
        "model_info": loaded.info,
        "layers": shape.layers,
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **more,
    }


def save(path: Path, method: str, figures: dict[str, Any], origin: dict[str, Any]) -> Path:
    """Write a calibration as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"method": method, "provenance": origin, **figures}, indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path, method: str, layers: int, q_heads: int) -> dict[str, Any]:
    """A calibration of `method` for a model of this size. Raises ValueError with one sentence when it is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        origin = found["provenance"]
        sizes = (origin["layers"], origin["q_heads"])
    except OSError:
        raise ValueError(
            f"the calibration '{path.name}' does not exist: make it with `kvlens calibrate {method} --model M`."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"'{path.name}' is not a calibration made by `kvlens calibrate {method}`.") from None
    if found.get("method") != method:
        raise ValueError(f"'{path.name}' calibrates {found.get('method')}, not {method}.")
    if sizes != (layers, q_heads):
        raise ValueError(
            f"'{path.name}' was made for {sizes[0]} layers of {sizes[1]} query heads, this model has {layers} "
            f"of {q_heads}: "
            f"run `kvlens calibrate {method} --model M` for it."
        )
    return dict(found)
