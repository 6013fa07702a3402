"""The header of a GGUF file: its fields and where its tensors lie. Every length is held against the file's own before
it is believed.

Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3 (little-endian).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlens.files import RefusedFile, check_ordinary
from kvlens.models.errors import UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""GGUF's value types as struct formats; 8 is a string, 9 an array"""
DEEPEST = 4
"""arrays within arrays; real files have none"""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file. shape: rows first, as numpy has it; start and size in bytes of the whole file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    """ggml's number of the storage type"""
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """Fields by their GGUF names, tensors by theirs."""

    fields: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def need(self, name: str) -> Any:
        """A field that must be there. Raises UnsupportedModel naming it."""
        if name not in self.fields:
            raise UnsupportedModel(f"the GGUF file lacks the field '{name}'.")
        return self.fields[name]


MOST = {"array": 1 << 23, "string": 1 << 26, "fields": 1 << 16, "tensors": 1 << 16, "dimensions": 4}
"""elements, bytes and counts that a header may claim; a sparse file could claim as many as its length"""


class _TooLarge(Exception):
    """The header claims more of something than any model has: (quantity, how many)."""


class _Cut(Exception):
    """The header asks for bytes that the file does not have."""


class _Reader:
    """Reads values one after the other and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalar(self, form: str) -> Any:
        size = struct.calcsize(form)
        self._room(size)
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        self._room(length)
        _bound("string", length)
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY and depth < DEEPEST:
            inner, count = self.scalar("<I"), self.scalar("<Q")
            self._room(count)  # an element has at least one byte
            _bound("array", count)
            read: Callable[[], Any] = self.string if inner == STRING else lambda: self.value(inner, depth + 1)
            if inner in SCALARS:
                form = f"<{count}{SCALARS[inner][1]}"
                self._room(struct.calcsize(form))
                values = list(struct.unpack_from(form, self.data, self.at))
                self.at += struct.calcsize(form)
                return values
            return [read() for _ in range(count)]
        if kind not in SCALARS:
            raise _Cut
        return self.scalar(SCALARS[kind])

    def _room(self, size: int) -> None:
        if size > len(self.data) - self.at:
            raise _Cut


def _bound(quantity: str, count: int) -> None:
    if count > MOST[quantity]:
        raise _TooLarge(quantity, count)


def read_header(path: Path) -> Header:
    """Fields and tensors of a GGUF file. Raises UnsupportedModel with one sentence for a file that is no GGUF, of
    another version, damaged or shorter than its tensors."""
    try:
        check_ordinary(path)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != MAGIC:
                raise UnsupportedModel(f"'{path.name}' is not a GGUF file.")
            reader = _Reader(data)
            reader.at = 4
            header = _read(path.name, reader)
    except _TooLarge as claim:
        quantity, count = claim.args
        raise UnsupportedModel(
            f"'{path.name}' cannot be read: its header claims {count:,} ({quantity}), the limit is {MOST[quantity]:,}."
        ) from None
    except (_Cut, UnicodeDecodeError, OverflowError, MemoryError):
        raise UnsupportedModel(f"'{path.name}' is damaged or cut short: its header cannot be read.") from None
    except ValueError as error:
        if isinstance(error, UnsupportedModel):
            raise
        if isinstance(error, RefusedFile):
            raise UnsupportedModel(str(error)) from None
        raise UnsupportedModel(f"'{path.name}' is not a GGUF file.") from None  # an empty file cannot be mapped
    except OSError as error:
        raise UnsupportedModel(f"'{path}' cannot be read: {error.strerror}.") from None
    refuse_shard(header, path.name)
    return header


def refuse_shard(header: Header, name: str) -> None:
    """Raise UnsupportedModel for one file of a model that is split into several."""
    count = header.fields.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        raise UnsupportedModel(
            f"'{name}' is one of {count} files of a split model: merge them into one file (llama-gguf-split --merge)."
        )


def _read(name: str, reader: _Reader) -> Header:
    version = reader.scalar("<I")
    if version not in VERSIONS:
        raise UnsupportedModel(f"'{name}' is GGUF of version {version}; versions 2 and 3 (little-endian) are read.")
    tensors, count = reader.scalar("<Q"), reader.scalar("<Q")
    _bound("tensors", tensors)
    _bound("fields", count)
    fields: dict[str, Any] = {}
    for _ in range(count):
        key = reader.string()
        fields[key] = reader.value(reader.scalar("<I"))
    entries = []
    for _ in range(tensors):
        tensor, rank = reader.string(), reader.scalar("<I")
        _bound("dimensions", rank)
        shape = tuple(reversed([reader.scalar("<Q") for _ in range(rank)]))
        entries.append((tensor, shape, reader.scalar("<I"), reader.scalar("<Q")))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Cut
    begin = -(-reader.at // alignment) * alignment
    placed = {}
    for tensor, shape, kind, offset in entries:
        size = storage_bytes(tensor, shape, kind)
        if begin + offset + size > len(reader.data):
            raise UnsupportedModel(
                f"'{name}' is cut short: tensor '{tensor}' ends at byte {begin + offset + size:,}, "
                f"the file has {len(reader.data):,}."
            )
        placed[tensor] = TensorEntry(tensor, shape, kind, begin + offset, size)
    return Header(fields, placed)


def storage_bytes(tensor: str, shape: tuple[int, ...], kind: int) -> int:
    """Bytes that a tensor of a storage type takes. Raises UnsupportedModel for a type that is not known, or rows that
    are not whole blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        raise UnsupportedModel(f"tensor '{tensor}' has a storage type that is not known (number {kind}).") from None
    if not shape or min(shape) < 1 or shape[-1] % block:
        raise UnsupportedModel(f"tensor '{tensor}' has an impossible shape {list(shape)} for its storage type.")
    values = 1
    for length in shape:
        values *= length
    return int(values // block * size)
