"""What a model's weights will take, by the headers of its files alone, before anything is loaded. No torch."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvlens.hostmemory import host_bytes
from kvlens.models.errors import UnsupportedModel
from kvlens.text.units import si_bytes

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""bytes of a number in each format that a model may be loaded in"""
_STORED = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MOST_HEADER = 1 << 27
OTHER_FORMAT, OTHER_MODEL = "take --dtype bfloat16", "take a smaller model"
"""remedies for weights that need more than the free memory; pages offer no number format"""
WORTH_SAYING = 1 << 30
"""bytes of weights from which the number format is worth a sentence"""


class ModelBeyondMemory(UnsupportedModel):
    """The weights need more memory than this machine has free."""

    code = "model_beyond_memory"

    def __init__(self, name: str, dtype: str, needed: int, free: int, remedy: str) -> None:
        self.needed, self.free = needed, free
        super().__init__(
            f"the weights of '{name}' take {si_bytes(needed)} in {dtype}, and {si_bytes(free)} of memory are free: "
            f"{remedy}."
        )


@dataclass(frozen=True)
class Weights:
    """The tensors of a model's files."""

    numbers: int
    dtype: str
    """format of most numbers"""

    def bytes_in(self, dtype: str) -> int:
        """Bytes of the weights once they are loaded in a format."""
        return self.numbers * NUMBER_BYTES[dtype]


def weights_in(folder: Path) -> Weights | None:
    """Count the numbers in the safetensors files of a folder; None where there are none or a header cannot be read."""
    counts: Counter[str] = Counter()
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size)) if size <= _MOST_HEADER else {}
            for name, tensor in header.items():
                if name != "__metadata__":
                    counts[tensor["dtype"]] += math.prod(tensor["shape"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if not counts:
        return None
    stored = counts.most_common(1)[0][0]
    return Weights(sum(counts.values()), _STORED.get(stored, stored.lower()))


def check_memory(folder: Path, name: str, dtype: str) -> None:
    """Raise ModelBeyondMemory where the weights need more than the free memory of this machine in a format."""
    weights, free = weights_in(folder), host_bytes()
    if weights is None or free is None or (needed := weights.bytes_in(dtype)) <= free:
        return
    smaller = weights.bytes_in("bfloat16")
    remedy = OTHER_FORMAT if smaller < needed and smaller <= free else OTHER_MODEL
    raise ModelBeyondMemory(name, dtype, needed, free, remedy)


def dtype_sentence(folder: Path, dtype: str) -> str:
    """Return what the number format costs, where the files hold a smaller one and the weights are large; else ''."""
    weights = weights_in(folder)
    if weights is None or not {weights.dtype, dtype} <= NUMBER_BYTES.keys():
        return ""
    needed, stored = weights.bytes_in(dtype), weights.bytes_in(weights.dtype)
    if needed <= stored or needed < WORTH_SAYING:
        return ""
    return (
        f"The weights take {si_bytes(needed)} in {dtype}; the model's files hold them in {weights.dtype}: --dtype "
        f"{weights.dtype} takes {si_bytes(stored)}."
    )
