"""Streams of a batch: what is ordered before what, noted in the place of torch.cuda's functions. No device is asked for
anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from static_support import Case, decoder
from support import random_llama, random_prompt

from kvlens.lab.gpu.static import BatchDecoder
from kvlens.lab.gpu.static.batch import OneLane, StreamLanes, lanes
from kvlens.lab.gpu.static.cuda import SideStream
from kvlens.methods import get

FORKS, JOINS = [("lane 0", "main"), ("lane 1", "main")], [("main", "lane 0"), ("main", "lane 1")]


class Streams:
    """Notes which stream waits for which, and knows the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[str, str]] = []
        self.kind = "lane"
        notes, made = self, {"lane": 0, "side": 0}

        class Stream:
            def __init__(self, device: torch.device, priority: int = 0) -> None:
                assert (priority < 0) == (notes.kind == "lane"), "what is waited for goes first"
                self.device, self.name = device, f"{notes.kind} {made[notes.kind]}"
                made[notes.kind] += 1

            def wait_stream(self, other: Any) -> None:
                notes.waits.append((self.name, other.name))

        class Main(Stream):
            def __init__(self) -> None:
                self.name = "main"

        self.current: Stream = Main()

        @contextmanager
        def on(stream: Any) -> Iterator[None]:
            before, self.current = self.current, stream
            yield
            self.current = before

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", on)

    def lanes_for(self, batch: BatchDecoder) -> None:
        self.kind = "lane"
        batch.seam.lanes = StreamLanes(torch.device("cuda"), len(batch.sessions))

    def sides_for(self, batch: BatchDecoder) -> None:
        self.kind = "side"
        for session in batch.sessions:
            session.aside = SideStream(torch.device("cuda"))


@pytest.fixture(scope="module")
def model() -> Any:
    return random_llama(num_hidden_layers=1)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def two(model: Any, case: Case) -> BatchDecoder:
    return BatchDecoder([decoder(model, random_prompt(300, seed), case, 4) for seed in (0, 1)])


def test_every_row_forks_for_itself_and_all_join_before_the_outputs_meet(
    model: Any, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = two(model, Case("full", None))
    streams.lanes_for(batch)
    issued: list[Any] = []
    met: list[Any] = []
    for row, session in enumerate(batch.sessions):
        for name in ("write", "attend"):
            monkeypatch.setattr(session, name, noted(session, name, row, issued, streams))
    real = torch.cat

    def cat(parts: Any, dim: int = 0) -> torch.Tensor:
        met.append((streams.current.name, list(streams.waits)))
        return real(parts, dim=dim)

    monkeypatch.setattr(torch, "cat", cat)
    try:
        batch.step([one.prompt.ids[-1] for one in batch.decoders])
        assert issued == [(name, row, f"lane {row}") for name in ("write", "attend") for row in (0, 1)]
        assert streams.waits == FORKS + JOINS + FORKS + FORKS + JOINS, (
            "slots are named, then tokens written, then attended"
        )
        assert met[-1] == ("main", streams.waits), "outputs meet when all have come"
    finally:
        batch.close()


def noted(session: Any, name: str, row: int, issued: list[Any], streams: Streams) -> Any:
    """The session's function, which notes on what stream it is called."""
    real = getattr(session, name)

    def call(*given: Any) -> Any:
        issued.append((name, row, streams.current.name))
        return real(*given)

    return call


def test_what_a_row_puts_aside_forks_from_its_lane_and_is_waited_for_by_the_step_alone(
    model: Any, streams: Streams
) -> None:
    """FreeKV's pages for the next step: two streams a sequence."""
    case = Case("freekv", "0.6", overrides=get("freekv").untrained)
    expected = two(model, case)
    batch = two(model, case)
    streams.lanes_for(batch)
    streams.sides_for(batch)
    try:
        ids = expected.decode(2)
        tokens = [one.prompt.ids[-1] for one in batch.decoders]
        for step in range(2):
            streams.waits.clear()
            tokens = batch.step(tokens).argmax(-1).tolist()
            assert tokens == [row[step] for row in ids]
        aside = [("lane 0", "main"), ("side 0", "lane 0"), ("lane 1", "main"), ("side 1", "lane 1")]
        assert streams.waits == FORKS + JOINS + FORKS + aside + JOINS + [("main", "side 0"), ("main", "side 1")]
    finally:
        batch.close()
        expected.close()


def test_lanes_are_for_several_sequences_on_cuda(streams: Streams) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert isinstance(lanes(cpu, 8), OneLane)
    assert isinstance(lanes(cuda, 1), OneLane)
    assert isinstance(lanes(cuda, 2), StreamLanes)
