"""Exceptions to a quantised method's bits: keys or values of single KV heads that are stored in other bits, or exactly.
No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvlens.refusal import Refusal
from kvlens.shape import KVShape

KEYS, VALUES = "K", "V"
SIDES = (KEYS, VALUES)
EXACT = 0
"""bits of a unit in the model's number format"""
ALL = -1
"""every KV head of the layer"""
_WRITTEN = re.compile(r"L(\d{1,4})(?:\.KV(\d{1,4}))?\.([KV])(?::(\d{1,2}))?", re.ASCII)


@dataclass(frozen=True, order=True)
class Finer:
    """Keys or values of a KV head, and the bits of their numbers."""

    layer: int
    kv_head: int
    """ALL: every KV head of the layer"""
    side: str
    """KEYS or VALUES"""
    bits: int = EXACT

    def __str__(self) -> str:
        head = "" if self.kv_head == ALL else f".KV{self.kv_head}"
        return f"L{self.layer}{head}.{self.side}" + ("" if self.bits == EXACT else f":{self.bits}")


def parse_finer(text: str) -> tuple[Finer, ...]:
    """Read 'L7.KV1.K, L3.V:4'. Raises Refusal (`finer_unreadable`)."""
    units = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _WRITTEN.fullmatch(part)
        if match is None:
            raise Refusal(
                f"finer '{part[:40]}': give L7.KV1.K for the keys of a KV head, .V for its values, L7.K for a whole "
                "layer, with :4 behind it for 4 bits instead of exact numbers.",
                code="finer_unreadable",
                unit=part[:40],
            )
        layer, head, side, bits = match.groups()
        units.append(Finer(int(layer), ALL if head is None else int(head), side, EXACT if bits is None else int(bits)))
    return tuple(units)


def finer_text(units: Iterable[Finer]) -> str:
    """Write units as `parse_finer` reads them."""
    return ",".join(map(str, sorted(units)))


def by_head(units: Iterable[Finer], shape: KVShape, widths: tuple[int, ...]) -> tuple[Finer, ...]:
    """Return units of single KV heads, the last one that names a head's side. widths: bits that the codes can have.
    Raises Refusal (`finer_no_head`, `finer_bits`)."""
    units_by_side: dict[tuple[int, int, str], Finer] = {}
    for unit in units:
        if unit.layer >= shape.layers or unit.kv_head >= shape.kv_heads:
            raise Refusal(
                f"finer {unit}: the method has {shape.layers} layers of {shape.kv_heads} KV heads, counted from 0.",
                code="finer_no_head",
                layer=unit.layer,
                kv_head=unit.kv_head,
            )
        if unit.bits != EXACT and unit.bits not in widths:
            names = ", ".join(map(str, widths))
            raise Refusal(
                f"finer {unit}: these codes have {names} bits a number; leave the bits out for exact numbers.",
                code="finer_bits",
                bits=unit.bits,
            )
        for head in range(shape.kv_heads) if unit.kv_head == ALL else (unit.kv_head,):
            units_by_side[unit.layer, head, unit.side] = replace(unit, kv_head=head)
    return tuple(sorted(units_by_side.values()))
