"""What a method says of the figures of a model that it needs, and the figures as they come from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlens.refusal import Refusal
from kvlens.shape import KVShape


def shipped(folder: Path, suffix: str = ".json") -> dict[str, Path]:
    """Model name -> file, of the figures that lie in a method's folder: `demo.json` is the demo model's."""
    return {path.stem: path for path in sorted(folder.glob(f"*{suffix}"))}


@dataclass(frozen=True)
class Content:
    """A calibration file as it was read."""

    name: str
    """of the file"""
    figures: dict[str, Any]
    """of a .json file its object; of a .safetensors file its tensors, by name"""
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Calibration:
    """One kind of figures that a method needs."""

    kind: str
    """name in RunContext.calibration, and what messages call it: 'thresholds'"""
    parameter: str
    """parameter that names the file; '' in it: the one shipped for the model"""
    shipped: Mapping[str, Path]
    """model name -> file"""
    made_by: str
    """command that makes the file, {model} for the model's name"""
    otherwise: str
    """what to do instead: 'use trigger=fixed, which needs none'"""
    needed: Callable[[Any], bool]
    """whether these parameters ask for it"""
    accept: Callable[[Content, Any, KVShape], Any]
    """(file, parameters, model's sizes) -> what the method is given. Raises ValueError with one sentence for figures
    that do not fit, KeyError, TypeError or ValueError for a file of something else."""
    maker: str = ""
    """what the file says it calibrates, where several methods share it; '': the method"""

    def file(self, method: str, params: Any, model: str) -> Path:
        """Where the figures are. Raises ValueError with one sentence when there are none."""
        source = str(getattr(params, self.parameter))
        path = Path(source).expanduser() if source else self.shipped.get(model)
        made_by = self.made_by.format(model=model)
        if path is None:
            raise ValueError(
                f"{method} has no {self.kind} for '{model}': run `{made_by}` and set {self.parameter} to the "
                f"file it "
                f"writes, or {self.otherwise}."
            )
        if not path.is_file():
            raise Refusal(
                f"{method}: the file '{path.name}' of {self.kind} does not exist: make it with `{made_by}`, or "
                f"{self.otherwise}.",
                code="calibration_missing",
            )
        return path
