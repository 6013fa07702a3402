"""What the Triton kernels share: a lazy import, element types, rounding, and what they ask of their tensors.

Triton is imported only where a kernel could run: a build of torch for CUDA, Triton's interpreter (TRITON_INTERPRET=1,
tests only), or a process that has imported Triton already (kvlens/lab/gpu/aot.py). Elsewhere `jit` leaves the
functions as they are, nobody calls them, and the PyTorch references work without Triton being installed.

Triton reads TRITON_INTERPRET when it is first imported, by whomever (transformers' Llama does), so it has to be in the
environment before. Nothing in the library sets it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

triton: Any = None
tl: Any = None
if INTERPRET or "triton" in sys.modules or torch.backends.cuda.is_built():
    import importlib

    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")

MIN_DOT = 16
"""Fewest rows of a tl.dot operand: query heads of a group are padded to it."""


def jit(kernel: Any) -> Any:
    """triton.jit where Triton is loaded. Kernels take pointers, and strides in elements; the launchers tell the
    shapes."""
    return kernel if triton is None else triton.jit(kernel)


@jit
def round_to(x, TO: tl.constexpr, BY_HAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 -> TO, to nearest, ties to even. BY_HAND (bf16 in the interpreter): its own cast truncates there. Finite x
    only."""
    if BY_HAND:
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TO)


def element(dtype: torch.dtype) -> Any:
    """Triton's name of a storage type."""
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def compute(dtype: torch.dtype) -> Any:
    """Type of tl.dot operands loaded from `dtype`: the type itself on a device (tensor cores), fp32 in the interpreter,
    which keeps bf16 as raw uint16 (loads and casts to fp32 are exact, arithmetic on it is silently wrong)."""
    return tl.float32 if INTERPRET else element(dtype)


def rounding(dtype: torch.dtype) -> dict[str, Any]:
    """The two constants of `round_to` for a store into `dtype`."""
    return {"TO": element(dtype), "BY_HAND": INTERPRET and dtype == torch.bfloat16}


def power_of_two(**sizes: int) -> None:
    """Raise ValueError naming the first size that is no power of two: Triton's blocks are."""
    for name, size in sizes.items():
        if size < 1 or size & (size - 1):
            raise ValueError(f"{name} must be a power of two for the Triton kernels, not {size}")


def warps(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Warps for a kernel whose largest operand is a tile [rows, columns]: as few as keep it in registers
    (docs/evidence/kernels.md)."""
    size = rows * columns * dtype.itemsize
    return 4 if size <= 1 << 14 else 8 if size <= 1 << 15 else 16


def next_power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
