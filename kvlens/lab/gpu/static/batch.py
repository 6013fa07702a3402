"""Several sequences in one step: one forward of the Hugging Face modules for all, with a static session for each.

The matrices are read once for all sequences. Attention paths (the method's `select`, plan, recall, k1) are issued
sequence by sequence, since every sequence has slots, span tables and a cold tier of its own; on CUDA they run beside
one another on streams of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self

import torch
from transformers.cache_utils import Cache

from kvlens.engine.batch import BatchLayer
from kvlens.lab.gpu.static.decoder import StaticDecoder
from kvlens.lab.gpu.static.driver import Driver
from kvlens.lab.gpu.static.session import StaticSession
from kvlens.lab.gpu.static.together import Together, together


class Lanes(Protocol):
    """Where the sequences' attention paths go."""

    def enter(self, row: int) -> AbstractContextManager[object]:
        """What is issued inside sees what was issued before outside and in this row's lane, and nothing of the other
        rows'."""

    def join(self) -> None:
        """What is issued from now on sees what was issued in all lanes."""


class OneLane:
    """Without streams: row after row."""

    def enter(self, row: int) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self) -> None:
        """Nothing is under way."""


class StreamLanes:
    """A CUDA stream for each sequence. It forks where keys and values come and joins before the output projection, in
    every layer, so a captured graph has as many branches. What the step waits for goes before what was put aside, so
    lanes have high priority. Tensors need no marks for the allocator: whatever passes between lanes and the main stream
    is held until the next fork or join."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self._device = device
        # torch hands out 32 streams of each priority in turn: of this one nobody else takes any, so no lane is
        # somebody's side stream
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(rows)]

    def enter(self, row: int) -> AbstractContextManager[object]:
        stream = self._streams[row]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(stream)

    def join(self) -> None:
        main = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            main.wait_stream(stream)


def lanes(device: torch.device, rows: int) -> Lanes:
    return StreamLanes(device, rows) if device.type == "cuda" and rows > 1 else OneLane()


class BatchSessions:
    """What the seam with transformers needs of a session, for sessions of which each has a row of the batch."""

    def __init__(self, sessions: Sequence[StaticSession], over: Lanes) -> None:
        self.sessions, self.lanes = sessions, over
        self.together: Together | None = None
        """what one launch does for all sequences; None: every launch is one sequence's"""

    def tokens_seen(self, layer: int) -> int:
        """Positions are given to the model, so nobody may ask."""
        raise AssertionError("a static step passes position_ids")

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The step's tokens: keys, values [B, H_kv, 1, D]."""
        for row, session in enumerate(self.sessions):
            with self.lanes.enter(row):
                session.write(layer, keys[row], values[row])

    def turn_and_write(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See kvlens.lab.gpu.static.llama.Attention."""
        if self.together is not None:
            return self.together.turn_and_write(layer, qkv, cos, sin)
        parts = zip(self.sessions, qkv.split(1), cos.split(1), sin.split(1), strict=True)
        return torch.cat([session.turn_and_write(layer, *row) for session, *row in parts])

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [B, Hq, 1, D] -> attention output of the same shape."""
        if self.together is not None and self.together.attends:
            return self.together.attend(layer, q, scaling)
        rows = []
        for row, session in enumerate(self.sessions):
            with self.lanes.enter(row):
                rows.append(session.attend(layer, q[row : row + 1], scaling))
        self.lanes.join()
        return torch.cat(rows)


class BatchDecoder(Driver):
    """Generations of as many prompts as there are decoders, one token each per step. The decoders have prefilled and
    made no step; from now on they step here alone. Prompts may differ in length; what the host does between steps it
    does for one after the other."""

    def __init__(self, decoders: Sequence[StaticDecoder]) -> None:
        assert decoders, "a batch has one sequence at least"
        head_item = decoders[0]
        assert all(decoder.model is head_item.model for decoder in decoders), "a batch is of one model"
        assert not any(decoder.steps for decoder in decoders), "the sequences of a batch begin together"
        self.decoders = list(decoders)
        generations = [generation for decoder in decoders for generation in decoder.generations]
        super().__init__(head_item.model, generations, [decoder.session for decoder in decoders])
        self.seam = BatchSessions(self.sessions, lanes(self.model.device, len(decoders)))
        self.cache = Cache(layers=[BatchLayer(self.seam, layer) for layer in range(head_item.loaded.shape.layers)])

    def _step(self) -> torch.Tensor:
        for row, session in enumerate(self.sessions):
            with self.seam.lanes.enter(row):
                session.begin()
        self.seam.lanes.join()
        positions = torch.stack([session.position for session in self.sessions])
        logits = self._forward(positions, self.seam, self.cache)
        for session in self.sessions:
            session.end()
        return logits

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed a token to each sequence -> logits [B, V]. At step 0 they are the prompts' last tokens."""
        return self.feed(tokens)

    def replay(self, tokens: Sequence[int]) -> torch.Tensor:
        """`step` through the captured graph. Raises RuntimeError without a capture."""
        return self.replayed(tokens)

    def decode(self, steps: int) -> list[list[int]]:
        """`steps` steps from the start -> the tokens chosen, a list for each sequence."""
        return self.run(steps)

    def compiled(self, backend: Any = "inductor") -> Self:
        """As Driver.compiled, all sequences in one graph. Sequences run one after the other there: what runs beside
        what is not the compiler's to see."""
        self.seam.lanes, self.seam.together = OneLane(), None
        return super().compiled(backend)

    def fused(self) -> Self:
        """As Driver.fused; tokens are written, and where nobody selects inside a step attended, by one launch for all
        sequences."""
        self.seam.together = together(self.sessions)
        return super().fused()

    def moved_bytes(self) -> torch.Tensor:
        """Payload brought to the device so far, int64 [B, 2, L, H_kv]: before attentions that waited, and after
        them."""
        return self.moved()
