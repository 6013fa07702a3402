"""Work as a CUDA graph: the one way to capture, for runs and benchmarks. Knows torch alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(work: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """The launches of `work` as a graph, and what it returned: every replay overwrites that. Nothing runs, so no state
    changes.

    What `work` compiles, loads or sets up once must have been done by a call before. Raises what `work` raised first,
    and not what CUDA says of a capture that was broken off; the device can be used afterwards.
    """
    graph = torch.cuda.CUDAGraph()
    exception: Exception | None = None
    # torch's capture stream stays the current one when the end of a capture fails, so the stream is put back here
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)), _nothing_collected():
        torch.cuda.synchronize(device)
        try:
            # thread_local: other threads may go on using the device
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                try:
                    out = work()
                except Exception as problem:
                    exception = problem
                    raise
        except Exception as problem:
            raise exception or problem from None
    return graph, out


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Tensors, events and graphs that only a cycle holds are freed before the capture, not in its midst."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
