"""What the kernel tests share. The kernels run in Triton's interpreter here (tests/conftest.py switches it on): that
proves indexing and algebra. It does not show bf16 arithmetic, tf32, races, or reads out of bounds; poison in unnamed
memory shows the last."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter() -> None:
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("these tests give the kernels CPU tensors, which only the interpreter takes (TRITON_INTERPRET=1)")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every tensor made by torch.empty holds NaN (floats) or the largest integer: an output nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    with np.errstate(divide="ignore"):  # the interpreter is NumPy, and log2(0) = -inf is meant
        yield
    torch.use_deterministic_algorithms(before)
