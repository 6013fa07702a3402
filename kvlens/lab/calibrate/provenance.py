"""Where a calibration comes from: stored beside its figures."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from kvlens.engine.models import LoadedModel
from kvlens.models.device import machine


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
