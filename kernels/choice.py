"""Which implementation a call takes: Triton for tensors on a CUDA device, PyTorch for all others.

Knows torch alone, so that a run can state its choice without importing Triton.
"""

from __future__ import annotations

from typing import Literal

import torch

Backend = Literal["triton", "torch"]


def backend(tensor: torch.Tensor) -> Backend:
    """'triton' for a CUDA tensor, else 'torch'. Neither the environment nor Triton's interpreter changes the answer."""
    return "triton" if tensor.is_cuda else "torch"
