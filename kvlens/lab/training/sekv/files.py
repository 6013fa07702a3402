"""A trained router as a file: safetensors, and its provenance beside it as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from kvlens.methods.calibration import read
from kvlens.methods.sekv.router import Router, router_of
from kvlens.shape import KVShape


def save_router(router: Router, path: Path) -> None:
    """Write `path` (.safetensors) and its provenance beside it (.json)."""
    tensors = {"weight": router.weight.contiguous(), "threshold": router.threshold.contiguous()}
    if router.gates is not None:
        tensors |= {f"gates.{name}": value.contiguous() for name, value in router.gates.state_dict().items()}
    save_file(tensors, path)
    path.with_suffix(".json").write_text(json.dumps(router.provenance, indent=1, sort_keys=True) + "\n")


def load_router(path: Path, shape: KVShape) -> Router:
    """A trained router. Raises ValueError when it was trained for a model of another shape."""
    results = read(path, "sekv", shape)
    return router_of(results.figures, results.provenance, path.name, shape)
