"""A static step as the engine's loop takes it: as it is, compiled whole, or in a CUDA graph.

B sequences, V entries of the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from kvlens.engine.loop import Generation
from kvlens.engine.steps import Course, decode
from kvlens.lab.gpu.static import cuda
from kvlens.lab.gpu.static.llama import Attention, FusedLlama
from kvlens.lab.gpu.static.session import StaticSession
from kvlens.methods.run_inputs import StepEnd


class Driver(ABC):
    """Generations that have been placed and made no step, the static sessions that took them over, and the one step
    that all of them make together."""

    def __init__(self, model: Any, generations: Sequence[Generation], sessions: Sequence[StaticSession]) -> None:
        self.model, self.generations, self.sessions = model, list(generations), list(sessions)
        self.others_ns = 0
        self._tokens = torch.zeros(len(self.sessions), 1, dtype=torch.long, device=model.device)
        self._plain: Callable[[], torch.Tensor] = self._step
        self._run = self._plain
        self._fused: FusedLlama | None = None
        self._captured = False
        self._warm = False
        """a step like those to come has been made, so everything that compiles, loads or allocates once has done so"""

    @property
    def courses(self) -> list[Course]:
        return [generation.course for generation in self.generations]

    @property
    def steps(self) -> int:
        """Steps that the methods have been told of."""
        return self.courses[0].steps

    @abstractmethod
    def _step(self) -> torch.Tensor:
        """`_tokens` through the model -> logits [B, V]. Tensors only."""

    def _forward(self, positions: torch.Tensor, attention: Attention, cache: Any) -> torch.Tensor:
        """`_tokens` at positions [B, 1] through the fused kernels, or through the modules with `cache` -> logits [B,
        V]."""
        if self._fused is not None:
            return self._fused(self._tokens, positions, attention)
        out = self.model(
            input_ids=self._tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    # ---- decoding
    @torch.inference_mode()
    def __call__(self, number: int, tokens: Sequence[int], ended: Sequence[StepEnd | None]) -> torch.Tensor:
        """kvlens.engine.steps.Step. Step 0 runs as it is: it is another program than the rest for methods that have
        nothing to speculate on yet."""
        for session, previous in zip(self.sessions, ended, strict=True):
            assert number < session.session.context.max_new, "all steps that were planned for have been made"
            session.between_steps(number, previous)
        self._tokens.copy_(torch.tensor(tokens)[:, None])
        logits = self._run() if number else self._step()
        for session in self.sessions:
            session.stepped()
        self._warm = number > 0
        return logits

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """One step whose tokens the caller chose -> logits [B, V]. At step 0 they are the prompts' last tokens."""
        for course, token in zip(self.courses, tokens, strict=True):
            course.feed(token)
        logits = self(self.steps, tokens, [course.ended for course in self.courses])
        for course, row in zip(self.courses, logits, strict=True):
            course.produced(row)
        return logits

    @torch.inference_mode()
    def run(self, steps: int, forced: tuple[int, ...] | None = None) -> list[list[int]]:
        """`steps` steps from the start through the engine's loop, as the options say or fed the `forced` tokens -> the
        tokens chosen, a list for each sequence."""
        assert not self.steps, "the sequences have begun"
        for generation in self.generations:
            generation.options = replace(generation.options, max_new=steps, forced=forced)
        decode(self, self.generations)
        return [generation.result.ids for generation in self.generations]

    # ---- other ways to make the step
    def fused(self) -> Self:
        """From now on the model's layers run by few fused kernels instead of the modules of transformers. Raises
        ValueError for a model that is not computed as Llama is."""
        self._fused = FusedLlama(self.model)
        self._warm = False
        return self

    def compiled(self, backend: Any = "inductor") -> Self:
        """From step 1 on the step is one graph of torch.compile, without a break and with fixed shapes. There is no
        second stream in it: who holds the memory that the other one still reads is not the compiler's to see."""
        for session in self.sessions:
            session.aside = cuda.InOrder()
        self._plain = self._run = torch.compile(self._step, fullgraph=True, dynamic=False, backend=backend)
        self._warm = False
        return self

    @torch.inference_mode()
    def capture(self) -> None:
        """Put the step, as it is or compiled, into a CUDA graph; from now on it is replayed. A step after step 0 must
        have been made the same way before. A second call captures anew. Raises RuntimeError on a CPU."""
        device = self.model.device
        assert device.type != "cuda" or self._warm, (
            "make a step like those to come before capturing; step 0 is another program"
        )
        run = cuda.capture(self._plain, device)
        self._run, self._captured = run, True

    def replayed(self, tokens: Sequence[int]) -> torch.Tensor:
        """`feed` through the captured graph; its logits are overwritten by the next one. Raises RuntimeError without a
        capture."""
        if not self._captured:
            raise RuntimeError("nothing has been captured: call capture() first, on a CUDA device.")
        return self.feed(tokens)

    @torch.inference_mode()
    def launch(self) -> torch.Tensor:
        """Issue the step as it is driven now, on the tokens fed last, without what lies between steps: for timing
        alone. Positions move on, no method is told. Logits [B, V]."""
        return self._run()

    def moved(self) -> torch.Tensor:
        """Payload brought to the device so far, int64 [B, 2, L, H_kv]: before attentions that waited, and after
        them."""
        return torch.stack([session.recall.moved.clone().cpu() for session in self.sessions])

    def close(self) -> None:
        """Give back the host memory. A captured step reads it, so there is none to be replayed any more."""
        self._run, self._captured = self._plain, False
        for generation in self.generations:
            generation.session.close()
