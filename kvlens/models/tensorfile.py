"""Writing a .safetensors file one tensor at a time, so that a large model never lies in memory whole.

Format: 8 bytes length of the header (little-endian), the header (JSON: name -> dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

Entry = tuple[str, str, tuple[int, ...]]
"""name, dtype, shape"""


def write_tensors(
    path: Path, entries: Sequence[Entry], values: Iterable[np.ndarray], report: Callable[[int], None]
) -> None:
    """Write `values` (contiguous, in the entries' order and dtype; BF16 as uint16). told(bytes written so far)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in entries:
        size = ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    written = 0
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, dtype, shape), value in zip(entries, values, strict=True):
            assert value.shape == shape, name
            assert value.nbytes == ITEM_BYTES[dtype] * math.prod(shape), name
            file.write(np.ascontiguousarray(value).data)
            written += value.nbytes
            report(written)


def total_bytes(entries: Sequence[Entry]) -> int:
    """Bytes of the data."""
    return sum(ITEM_BYTES[dtype] * math.prod(shape) for _, dtype, shape in entries)
