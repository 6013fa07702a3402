"""A matrix times the few vectors of a decode step, with what stands before and after it in a decoder layer.

One launch does RMSNorm, product and SiLU gate, or product and residual sum. A step reads every weight once, so the
kernel has to read at the device's copy rate; all else hides behind the reads. The norm needs no pass of its own: its
scale is one number, summed up beside the product and applied at the end. On CUDA one vector takes plain products in
float32; several take tensor cores, and a launch before them for the norm. Shapes: B vectors, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import compute, next_power_of_two, rounding
from kvlens.lab.gpu.kernels.matvec_kernels import norm_rows, of_one, of_several

MOST = 16
"""vectors of a call: rows of one product of tensor cores"""


class Tile(NamedTuple):
    """What a program reads at a time, and how it is compiled."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 1


ONE = (Tile(4, 1024, 2), Tile(8, 512, 2), Tile(4, 1024, 4), Tile(2, 1024, 2), Tile(8, 1024, 4))
"""tiles worth measuring for one vector; the first is taken where nothing was measured: on an H200 within 8 % of the
fastest of each shape"""
SEVERAL = (Tile(16, 256, 2, 4), Tile(32, 128, 4, 5), Tile(64, 128, 4, 4))
"""the same for several vectors"""
MEASURED: dict[tuple[int, int, bool, bool], Tile] = {}
"""(N, K, several vectors, gated) -> the fastest tile on this device"""


@dataclass(frozen=True)
class Around:
    """What is computed beside the product. norm [K]: weight of an RMSNorm of the vectors, with its epsilon; gated: the
    matrix has 2 N rows, gates before ups, and SiLU(gate) * up is returned; add [B, N]: is added to the result."""

    norm: torch.Tensor | None = None
    epsilon: float = 0.0
    gated: bool = False
    add: torch.Tensor | None = None


NOTHING = Around()


def matvec(x: torch.Tensor, matrix: torch.Tensor, around: Around = NOTHING) -> torch.Tensor:
    """Return x [B, K] times matrix [N or 2 N, K] transposed, [B, N] in the type of x. x may have any stride between
    vectors, the matrix is contiguous. Sums are float32 until the result is rounded once. CUDA tensors take Triton,
    others PyTorch."""
    out: torch.Tensor = torch.ops.kvlens.matvec(x, matrix, around.norm, around.epsilon, around.gated, around.add)
    return out


def matvec_torch(x: torch.Tensor, matrix: torch.Tensor, around: Around = NOTHING) -> torch.Tensor:
    """The reference: float32 inside, float64 where x is float64."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    vectors = x.to(wide)
    if around.norm is not None:
        scale = (vectors.square().mean(-1, keepdim=True) + around.epsilon).rsqrt()
        vectors = vectors * scale * around.norm.to(wide)
    out = vectors @ matrix.to(wide).T
    if around.gated:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    if around.add is not None:
        out = out + around.add.to(wide)
    return out.to(x.dtype)


def best_tile(outputs: int, inputs: int, vectors: int, gated: bool) -> Tile:
    """Return the tile measured for this shape, else the first one."""
    several = vectors > 1
    return MEASURED.get((outputs, inputs, several, gated), (SEVERAL if several else ONE)[0])


def matvec_triton(
    x: torch.Tensor, matrix: torch.Tensor, around: Around = NOTHING, tile: Tile | None = None
) -> torch.Tensor:
    """As `matvec`. tile: None: the best one known."""
    vectors, inputs = x.shape
    outputs = len(matrix) // (2 if around.gated else 1)
    assert vectors <= MOST
    assert matrix.is_contiguous()
    assert x.stride(1) == 1
    assert around.add is None or around.add.stride(1) == 1
    tile = tile or best_tile(outputs, inputs, vectors, around.gated)
    if vectors > 1 and around.norm is not None:
        # inside the product every program would norm all vectors again, which took longer than the product
        x, around = normalise(x, around.norm, around.epsilon), replace(around, norm=None)
    stages = tile.stages if x.dtype.itemsize < 4 else min(2, tile.stages)
    per = min(tile.inputs, next_power_of_two(inputs))
    out = torch.empty(vectors, outputs, dtype=x.dtype, device=x.device)
    add_stride = 0 if around.add is None else around.add.stride(0)
    common = {"K": inputs, "BN": tile.outputs, "BK": per, "GATED": around.gated, "ADD": around.add is not None}
    tensors: tuple[Any, ...]
    more: dict[str, Any]
    if vectors == 1:
        tensors = x, matrix, around.norm, around.add, out, around.epsilon, outputs
        kernel, more = of_one, {"NORM": around.norm is not None}
    else:
        tensors = x, matrix, around.add, out, outputs, x.stride(0), add_stride
        kernel, more = of_several, {"B": vectors, "BP": MOST, "COMPUTE": compute(x.dtype)}
    kernel[(-(-outputs // tile.outputs),)](
        *tensors, **common, **more, **rounding(x.dtype), num_warps=tile.warps, num_stages=stages, enable_fp_fusion=True
    )
    return out


def normalise(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of vectors [B, K] by one launch, rounded once."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_rows[(len(x),)](
        x,
        weight,
        out,
        epsilon,
        x.stride(0),
        K=x.shape[1],
        KP=next_power_of_two(x.shape[1]),
        **rounding(x.dtype),
        num_warps=8,
        enable_fp_fusion=True,
    )
    return out


@torch.library.custom_op(
    "kvlens::matvec",
    mutates_args=(),
    schema="(Tensor x, Tensor matrix, Tensor? norm, float epsilon, bool gated, Tensor? add) -> Tensor",
)
def _matvec(
    x: torch.Tensor,
    matrix: torch.Tensor,
    norm: torch.Tensor | None,
    epsilon: float,
    gated: bool,
    add: torch.Tensor | None,
) -> torch.Tensor:
    """A custom operator, so that torch.compile takes it as one call."""
    way = matvec_triton if backend(x) == "triton" else matvec_torch
    return way(x, matrix, Around(norm, epsilon, gated, add))


@_matvec.register_fake
def _(
    x: torch.Tensor,
    matrix: torch.Tensor,
    norm: torch.Tensor | None,
    epsilon: float,
    gated: bool,
    add: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], len(matrix) // (2 if gated else 1))
