"""The player's binary payload: 4-byte little-endian header length | JSON header | typed arrays."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

#: Code of a value that was not recorded; recorded values take 0..65534.
NOT_RECORDED = 65535
_TYPES = {"uint8": "u1", "uint16": "u2", "int32": "i4", "float32": "f4", "float64": "f8"}


def quantise(values: np.ndarray, lo: float, hi: float) -> np.ndarray:
    """uint16 codes, same shape: lo -> 0, hi -> 65534, NaN -> NOT_RECORDED. The error is at most (hi - lo) / 131068."""
    span = hi - lo if hi > lo else 1.0
    scaled = np.rint(np.clip((values - lo) / span, 0.0, 1.0) * 65534)
    return np.where(np.isfinite(values), scaled, NOT_RECORDED).astype(np.uint16)


def pack(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """One message. Arrays keep their element type (u1, u2, i4, f4, f8) and lose their shape."""
    listing: list[tuple[str, str, int]] = []
    blobs: list[bytes] = []
    for name, array in arrays.items():
        listing.append((name, _TYPES[array.dtype.name], int(array.size)))
        blobs.append(np.ascontiguousarray(array).tobytes())
    head = json.dumps({**header, "arrays": listing}, ensure_ascii=False, allow_nan=False).encode()
    return struct.pack("<I", len(head)) + head + b"".join(blobs)


def unpack(message: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Inverse of `pack`: header and flat arrays."""
    (length,) = struct.unpack_from("<I", message)
    header = json.loads(message[4 : 4 + length])
    arrays: dict[str, np.ndarray] = {}
    offset = 4 + length
    for name, kind, count in header["arrays"]:
        dtype = np.dtype(f"<{kind}")
        arrays[name] = np.frombuffer(message, dtype, count, offset)
        offset += count * dtype.itemsize
    return header, arrays
