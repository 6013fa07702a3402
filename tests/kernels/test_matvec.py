"""A matrix times the vectors of a step equals float64, whatever stands around it; bytes that nobody names stay out."""

from __future__ import annotations

import pytest
import torch

from kvlens.lab.gpu.kernels.matvec import Around, Tile, matvec, matvec_torch, matvec_triton

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
AROUNDS = ("nothing", "norm", "add", "norm, gated", "gated, add")


def drawn(
    vectors: int, outputs: int, inputs: int, around: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, Around]:
    """Vectors that lie apart, with NaN between them, a matrix, and what stands around the product."""
    g = torch.Generator().manual_seed(vectors + outputs + inputs)
    gated = "gated" in around
    wider = torch.full((vectors, inputs + 3), torch.nan)
    wider[:, :inputs] = torch.randn(vectors, inputs, generator=g)
    matrix = torch.randn(outputs * (2 if gated else 1), inputs, generator=g) * inputs**-0.5
    norm = torch.rand(inputs, generator=g).to(dtype) if "norm" in around else None
    add = torch.randn(vectors, outputs, generator=g).to(dtype) if "add" in around else None
    return wider.to(dtype)[:, :inputs], matrix.to(dtype), Around(norm, 1e-5, gated, add)


def exact(x: torch.Tensor, matrix: torch.Tensor, around: Around) -> torch.Tensor:
    norm, add = (None if value is None else value.double() for value in (around.norm, around.add))
    return matvec_torch(x.double(), matrix.double(), Around(norm, around.epsilon, around.gated, add))


@pytest.mark.parametrize("around", AROUNDS)
@pytest.mark.parametrize("vectors", [1, 2, 8])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_kernel_is_the_product_in_float64(dtype: torch.dtype, vectors: int, around: str) -> None:
    x, matrix, beside = drawn(vectors, 37, 100, around, dtype)
    target = exact(x, matrix, beside)
    for tile in (Tile(16, 32, 4), Tile(16, 128, 2, 3)):
        out = matvec_triton(x, matrix, beside, tile)
        assert out.dtype == dtype
        assert float((out.double() - target).norm() / target.norm()) <= TOLERANCE[dtype]
    by_torch = matvec(x, matrix, beside)
    assert float((by_torch.double() - target).norm() / target.norm()) <= TOLERANCE[dtype]


def test_the_reference_is_the_layer_of_transformers() -> None:
    """RMSNorm, gate and residual as LlamaMLP and LlamaRMSNorm compute them."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=48, intermediate_size=80, num_attention_heads=4)
    mlp, norm = LlamaMLP(config).double(), LlamaRMSNorm(48, 1e-5).double()
    norm.weight.data.uniform_()
    x = torch.randn(3, 48, dtype=torch.float64)
    # transformers' norm computes in float32 whatever it is given
    expected = x + mlp(norm(x))
    joined = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    inner = matvec_torch(x, joined, Around(norm.weight, 1e-5, gated=True))
    out = matvec_torch(inner, mlp.down_proj.weight, Around(add=x))
    assert torch.allclose(out, expected, atol=1e-6)
