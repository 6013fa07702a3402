"""Numbers in few bits: groups of neighbours share a scale and a zero, codes lie packed in bytes. Tensors only.

Asymmetric, per group: zero = min, scale = (max - min) / (2^b - 1), code = round((x - zero) / scale), as several methods
do. Scale and zero are float16 and the codes are made with them as stored, so that nothing is lost twice.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvlens.kernels.code_bytes import code_bytes


class Packed(NamedTuple):
    """Rows of m numbers in groups of g, the last one shorter where g does not divide m."""

    codes: torch.Tensor
    """uint8 [..., code_bytes(m, bits)], the first number in the lowest bits"""
    scale: torch.Tensor
    """float16 [..., ceil(m / g)]"""
    zero: torch.Tensor
    """float16 [..., ceil(m / g)]"""


def row_bytes(numbers: int, bits: int, group: int) -> int:
    """Bytes of a row: codes, and scale and zero of each group."""
    return code_bytes(numbers, bits) + -(-numbers // group) * 4


def quantise(x: torch.Tensor, bits: int, group: int) -> Packed:
    """x [..., m] -> its rows packed. A group of equal numbers has scale 0 and is exact up to its float16 zero."""
    m, limit = x.shape[-1], torch.finfo(torch.float16).max
    short = -m % group
    wide = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], -1) if short else x
    grouped = wide.float().unflatten(-1, (-1, group))
    low, high = grouped.aminmax(dim=-1)
    scale = ((high - low) / (2**bits - 1)).clamp(max=limit).half()
    zero = low.clamp(-limit, limit).half()
    step = scale.float()[..., None]
    codes = torch.where(step > 0, (grouped - zero.float()[..., None]) / step, 0).round().clamp(0, 2**bits - 1)
    return Packed(pack(codes.to(torch.uint8).flatten(-2)[..., :m], bits), scale, zero)


def restore(packed: Packed, bits: int, group: int, room: torch.Tensor) -> None:
    """Write the rows that were packed into room [..., m], as far as the bits hold them, however its numbers lie."""
    codes = unpack(packed.codes, room.shape[-1], bits)
    scale, zero = packed.scale.float(), packed.zero.float()
    if room.shape[-1] % group == 0:
        room, codes = (t.unflatten(-1, (-1, group)) for t in (room, codes))
        scale, zero = scale[..., None], zero[..., None]
    else:
        scale, zero = (t.repeat_interleave(group, -1)[..., : room.shape[-1]] for t in (scale, zero))
    if room.dtype == torch.float32:
        torch.addcmul(zero, codes, scale, out=room)
    else:
        room.copy_(torch.addcmul(zero, codes, scale))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., m] below 2^bits -> bytes [..., code_bytes(m, bits)]."""
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], -1)
    each = 8 // bits
    lanes = F.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    out = lanes[..., 0].clone()
    for lane in range(1, each):
        out |= lanes[..., lane] << (lane * bits)
    return out


def unpack(packed: torch.Tensor, numbers: int, bits: int) -> torch.Tensor:
    """bytes [..., code_bytes(m, bits)] -> codes float32 [..., m], m being `numbers`."""
    if bits == 8:
        return packed[..., :numbers].float()
    return look_up(packed, numbers, bits, _codes(bits, packed.device))


def look_up(packed: torch.Tensor, numbers: int, bits: int, table: torch.Tensor) -> torch.Tensor:
    """bytes [..., code_bytes(m, bits)] -> what a table of `table_of` has for each code, float32 [..., m]."""
    index = packed.int()
    if bits == 3:  # a byte of four codes' low bits, and four of the bits above them
        split = code_bytes(numbers, 2)
        low, high = index[..., :split], index[..., split:]
        above = torch.stack((high & 15, high >> 4), -1).flatten(-2)[..., :split]
        index = low + (above << 8)
    numbers_read = table.index_select(0, index.flatten())
    return numbers_read.view(*index.shape[:-1], index.shape[-1] * table.shape[1])[..., :numbers]


def table_of(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return what `look_up` needs to find values[code]: of each byte the values of its codes, float32 [256, 8 / bits];
    [4,096, 4] where codes of 3 bits lie in two places. values float32 [2^bits]."""
    return values[_codes(bits, values.device).long()]


@cache
def _codes(bits: int, device: torch.device) -> torch.Tensor:
    """Return the codes of each byte, float32, as `table_of` has them."""
    if bits == 3:
        index = torch.arange(4096, device=device)[:, None]
        lanes = torch.arange(4, device=device)
        return ((index >> 2 * lanes & 3) + 4 * (index >> 8 + lanes & 1)).float()
    byte = torch.arange(256, device=device)[:, None]
    return ((byte >> torch.arange(0, 8, bits, device=device)) & (2**bits - 1)).float()
