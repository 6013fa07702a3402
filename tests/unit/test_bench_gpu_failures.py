"""What a part that fails leaves behind: one sentence, by which somebody without the machine can tell what happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvlens.kernels.compat import power_of_two
from kvlens.lab.gpu.failures import sentence
from kvlens.link.host_memory import PinnedSlabs


def raised(work: Any) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011  whatever it is
        work()
    return caught.value


def test_a_part_that_a_library_loads_late_is_told_by_what_it_lacks() -> None:
    def late() -> None:
        try:
            raise ModuleNotFoundError("No module named 'tokenizers'")
        except ModuleNotFoundError as problem:
            raise ModuleNotFoundError("Could not import module 'LlamaConfig'.") from problem

    assert sentence(raised(late), "")[0] == "ModuleNotFoundError: No module named 'tokenizers'"


def test_what_nobody_has_foreseen_says_where_it_came_from() -> None:
    reason, suggestion = sentence(raised(lambda: power_of_two(page=12)), "")
    assert reason.startswith(
        "ValueError: page must be a power of two for the Triton kernels, not 12 (kvlens/kernels/compat.py, line "
    )
    assert suggestion is None
    assert sentence(ValueError("elsewhere"), "")[0] == "ValueError: elsewhere"


def test_a_shortage_is_said_once() -> None:
    def refuse(address: int, size: int) -> None:
        raise RuntimeError("cudaHostRegister: out of memory")

    reason, _ = sentence(raised(lambda: PinnedSlabs(refuse, lambda address: None).take((8,), torch.float32)), "")
    assert reason.startswith(
        "Pinned host memory could not be had: 1048576 bytes were asked for, 0 are held (cudaHostRegister: out "
        "of memory)"
    )
    assert reason.lower().count("could not be had") == 1


@pytest.mark.parametrize(
    ("problem", "begins"),
    [
        (MemoryError(), "The host ran out of memory."),
        (RuntimeError("Cannot pin memory"), "Pinned host memory could not be had"),
        (KeyError("x"), "KeyError"),
    ],
)
def test_failures_in_words(problem: Exception, begins: str) -> None:
    assert sentence(problem, "less")[0].startswith(begins)
