"""Capturing a CUDA graph, where CUDA is stood in for: what is raised when the captured work fails, and what is put
back."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlens.lab.gpu.capture import captured
from kvlens.lab.gpu.static import cuda

DEVICE = torch.device("cuda", 0)
REFUSED = "operation not permitted when stream is capturing"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch.cuda was asked for. As the real one, its capture stream stays current where the end of a capture
    raises."""
    said: list[str] = []
    now = ["main"]

    @contextmanager
    def stream(name: str) -> Any:
        before, now[0] = now[0], name
        try:
            yield
        finally:
            now[0] = before

    class Graph:
        def replay(self) -> None:
            said.append("replayed")

    class Capture:
        def __init__(self, graph: Graph, capture_error_mode: str) -> None:
            said.append(capture_error_mode)

        def __enter__(self) -> None:
            self.before, now[0] = now[0], "capture"
            assert not gc.isenabled()

        def __exit__(self, kind: object, *rest: object) -> None:
            if kind is RuntimeError:
                raise RuntimeError("operation failed due to a previous error during capture")
            now[0] = self.before

    stands = SimpleNamespace(
        CUDAGraph=Graph,
        graph=Capture,
        device=lambda device: stream("main"),
        stream=stream,
        current_stream=lambda device: now[0],
        synchronize=lambda device: said.append("waited"),
        now=now,
    )
    monkeypatch.setattr("kvlens.lab.gpu.capture.torch.cuda", stands)
    return said


def test_the_work_is_captured_once_and_replayed_into_the_same_output(said: list[str]) -> None:
    made: list[int] = []
    out = torch.zeros(2)

    def step() -> torch.Tensor:
        made.append(1)
        return out

    replay = cuda.capture(step, DEVICE)
    assert replay() is out
    assert replay() is out
    assert made == [1]
    assert said == ["waited", "thread_local", "replayed", "replayed"]
    assert gc.isenabled()


def test_what_the_work_raised_comes_first(said: list[str]) -> None:
    def work() -> None:
        raise RuntimeError(REFUSED)

    with pytest.raises(RuntimeError, match=REFUSED):
        captured(work, DEVICE)
    assert torch.cuda.now == ["main"], "later work would be issued to the stream of the capture"  # type: ignore[attr-defined]
    assert gc.isenabled()


def test_an_end_that_fails_by_itself_is_told(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*more: object) -> None:
        raise RuntimeError("capture was not joined to the original stream")

    monkeypatch.setattr(torch.cuda.graph, "__exit__", fails)
    with pytest.raises(RuntimeError, match="not joined"):
        captured(lambda: 1, DEVICE)
