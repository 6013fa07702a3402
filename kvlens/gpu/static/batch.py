"""Several sequences in one step: one forward of the Hugging Face modules for all, with a static session for each.

The matrices are read once for all sequences. Attention paths (the method's `select`, plan, recall, k1) are issued
sequence by sequence, since every sequence has slots, span tables and a cold tier of its own; on CUDA they run beside
one another on streams of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from kvlens.engine.hf_attention import SessionLayer
from kvlens.gpu.static import cuda
from kvlens.gpu.static.decoder import StaticDecoder
from kvlens.gpu.static.session import StaticSession


class Lanes(Protocol):
    """Where the sequences' attention paths go."""

    def of(self, row: int) -> AbstractContextManager[object]:
        """What is issued inside sees what was issued before outside and in this row's lane, and nothing of the other
        rows'."""

    def join(self) -> None:
        """What is issued from now on sees what was issued in all lanes."""


class OneLane:
    """Without streams: row after row."""

    def of(self, row: int) -> AbstractContextManager[object]:
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

    def of(self, row: int) -> AbstractContextManager[object]:
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

    def tokens_seen(self, layer: int) -> int:
        """Positions are given to the model, so nobody may ask."""
        raise AssertionError("a static step passes position_ids")

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The step's tokens: keys, values [B, H_kv, 1, D]."""
        for row, session in enumerate(self.sessions):
            with self.lanes.of(row):
                session.write(layer, keys[row], values[row])

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [B, Hq, 1, D] -> attention output of the same shape."""
        found = []
        for row, session in enumerate(self.sessions):
            with self.lanes.of(row):
                found.append(session.attend(layer, q[row : row + 1], scaling))
        self.lanes.join()
        return torch.cat(found)


class BatchLayer(SessionLayer):
    """A cache layer that hands each row's keys and values to its session."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.session.write(self.layer, key_states, value_states)
        key_states.kvlens_session = self.session  # type: ignore[attr-defined]
        return key_states, value_states


class BatchDecoder:
    """Generations of as many prompts as there are decoders, one token each per step. The decoders have prefilled and
    made no step; from now on they step here alone. Prompts may differ in length; what the host does between steps it
    does for one after the other."""

    def __init__(self, decoders: Sequence[StaticDecoder]) -> None:
        assert decoders, "a batch has one sequence at least"
        first = decoders[0]
        assert all(decoder.loaded.model is first.loaded.model for decoder in decoders), "a batch is of one model"
        assert not any(decoder.steps for decoder in decoders), "the sequences of a batch begin together"
        self.decoders = list(decoders)
        self.sessions = [decoder.session for decoder in decoders]
        self.model, self.steps = first.loaded.model, 0
        device = self.model.device
        self.seam = BatchSessions(self.sessions, lanes(device, len(decoders)))
        self.cache = Cache(layers=[BatchLayer(self.seam, layer) for layer in range(first.loaded.shape.layers)])
        self._tokens = torch.zeros(len(decoders), 1, dtype=torch.long, device=device)
        self._plain: Callable[[], torch.Tensor] = self._step
        self._run = self._plain
        self._captured = False
        self._warm = False
        """as StaticDecoder's"""

    def _step(self) -> torch.Tensor:
        for row, session in enumerate(self.sessions):
            with self.seam.lanes.of(row):
                session.begin()
        self.seam.lanes.join()
        positions = torch.stack([session.position for session in self.sessions])
        out = self.model(
            input_ids=self._tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        for session in self.sessions:
            session.end()
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    # -----------------------------------------------------------------------------------------------------------------
    # decoding
    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed a token to each sequence -> logits [B, V]. At step 0 they are the prompts' last tokens."""
        for decoder, token in zip(self.decoders, tokens, strict=True):
            decoder.before(token)
        self._tokens.copy_(torch.tensor(tokens)[:, None])
        logits = self._run() if self.steps else self._step()
        for row, decoder in enumerate(self.decoders):
            decoder.after(logits[row])
        self._warm = self.steps > 0
        self.steps += 1
        return logits

    def decode(self, steps: int) -> list[list[int]]:
        """`steps` steps from the start, each sequence fed its likeliest token -> the tokens chosen, a list for each
        sequence."""
        tokens, ids = [decoder.prompt.ids[-1] for decoder in self.decoders], []
        for _ in range(steps):
            tokens = self.step(tokens).argmax(-1).tolist()
            ids.append(tokens)
        return [list(row) for row in zip(*ids, strict=True)]

    # --------------------------------------------------------------------------------------------------------------
    # other drivers
    def compiled(self, backend: Any = "inductor") -> BatchDecoder:
        """As StaticDecoder.compiled, all sequences in one graph. Sequences run one after the other there: what runs
        beside what is not the compiler's to see."""
        self.seam.lanes = OneLane()
        for session in self.sessions:
            session.aside = cuda.InOrder()
        self._plain = self._run = torch.compile(self._step, fullgraph=True, dynamic=False, backend=backend)
        self._warm = False
        return self

    @torch.inference_mode()
    def capture(self) -> None:
        """As StaticDecoder.capture: one CUDA graph for all sequences. Raises RuntimeError on a CPU."""
        device = self.model.device
        assert device.type != "cuda" or self._warm, (
            "make a step like those to come before capturing; step 0 is another program"
        )
        run = cuda.capture(self._plain, device)
        self._run, self._captured = run, True

    def replay(self, tokens: Sequence[int]) -> torch.Tensor:
        """`step` through the captured graph. Raises RuntimeError without a capture."""
        if not self._captured:
            raise RuntimeError("nothing has been captured: call capture() first, on a CUDA device.")
        return self.step(tokens)

    @torch.inference_mode()
    def launch(self) -> torch.Tensor:
        """As StaticDecoder.launch, for all sequences."""
        return self._run()

    def moved_bytes(self) -> torch.Tensor:
        """Payload brought to the device so far, int64 [B, 2, L, H_kv]: before attentions that waited, and after
        them."""
        return torch.stack([decoder.moved_bytes() for decoder in self.decoders])

    def close(self) -> None:
        """Give back the host memory. A captured step reads it, so there is none to be replayed any more."""
        self._run, self._captured = self._plain, False
        for decoder in self.decoders:
            decoder.close()
