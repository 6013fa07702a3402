"""All that a static step does on CUDA and nowhere else: pinned memory, the kernel that reads it, a stream for what is
needed later, capture. Small, and apart, since none of it runs without a GPU (evidence/static-step.md says what has been
run)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from kvlens.lab.gpu.capture import captured
from kvlens.lab.gpu.kernels.lowrank_spans import Spans, reconstruct_triton
from kvlens.lab.gpu.kernels.page_moves import CTAS, move_triton

PAGE_BYTES = 1 << 14
"""of a unit for which CTAS programs are enough; smaller units need more of them, to have as many bytes under way"""
WAITED = 64
"""programs at least where the attention waits: nothing else runs then, and every unit's bytes can be under way"""


# Launches are custom operators: torch.compile takes each as one call, and need not understand Triton's launch options.


@torch.library.custom_op(
    "kvlens::fetch_rows",
    mutates_args=("keys", "values"),
    schema="(Tensor pool, Tensor unit, Tensor(a!) keys, Tensor(b!) values, bool later) -> ()",
)
def fetch(pool: torch.Tensor, unit: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, later: bool) -> None:
    """Units into cells by the zero-copy kernel; as kvlens.lab.gpu.static.recall.fetch."""
    unit_bytes = 2 * pool.shape[3] * pool.shape[4] * pool.element_size()
    ctas = CTAS * max(1, PAGE_BYTES // unit_bytes)
    ctas = ctas if later else max(WAITED, ctas)
    move_triton(pool, unit, None, keys.transpose(0, 1), values.transpose(0, 1), to_pool=False, ctas=ctas)


@torch.library.custom_op(
    "kvlens::reconstruct_spans",
    mutates_args=("keys", "values"),
    schema="(Tensor flat, Tensor meta, int rank, Tensor tiles, Tensor(a!) keys, Tensor(b!) values) -> ()",
)
def reconstruct(
    flat: torch.Tensor, meta: torch.Tensor, rank: int, tiles: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """meta [H_kv, S, 4]; tiles and keys, values as kvlens.lab.gpu.kernels.lowrank_spans.reconstruct."""
    reconstruct_triton(Spans(flat, meta[None], rank), tiles, keys, values)


class Aside(Protocol):
    """Where work goes that nothing in this step waits for."""

    def later(self, keep: object) -> AbstractContextManager[object]:
        """What is issued inside sees everything issued before, and runs beside what is issued after. keep: holds the
        tensors that it reads, whose memory must not be given to others before `join`."""

    def join(self) -> None:
        """What is issued from now on sees all of it."""


class InOrder:
    """Without streams: everything runs where it stands."""

    def later(self, keep: object) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self) -> None:
        """Nothing is under way."""


class SideStream:
    """A second CUDA stream, forked after the layer's attention and joined at the end of the step, so that a captured
    graph has it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._kept: list[object] = []

    def later(self, keep: object) -> AbstractContextManager[object]:
        self._kept.append(keep)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        # a capture may wait only for a stream that it has forked itself
        if self._kept:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._kept.clear()


def aside(device: torch.device) -> Aside:
    return SideStream(device) if device.type == "cuda" else InOrder()


def capture(step: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """`step` as a CUDA graph: what is returned replays it, into the same output tensor.

    Raises RuntimeError where there is no CUDA device, and what `kvlens.lab.gpu.capture.captured` does.
    """
    if device.type != "cuda":
        raise RuntimeError(
            "a CUDA graph needs a model on a CUDA device; on the CPU use step() as it is, or compiled()."
        )
    graph, out = captured(step, device)

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay
