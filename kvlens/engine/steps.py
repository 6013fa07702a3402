"""Decode steps: what makes one, what goes into it from step to step, and the loop that makes them one after the other.

B sequences, V entries of the vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from kvlens.engine.ahead import LookAhead
from kvlens.engine.batch import Seat
from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.models import LoadedModel
from kvlens.engine.options import Result
from kvlens.engine.session import Session
from kvlens.methods.run_inputs import StepEnd
from kvlens.text.plaintext import TokenStream
from kvlens.text.prompts import Prompt


class Step(Protocol):
    """Makes decode steps of one sequence or of several, whatever it runs on."""

    others_ns: int
    """nanoseconds of the last call that other runs took"""

    def __call__(self, number: int, tokens: Sequence[int], ended: Sequence[StepEnd | None]) -> torch.Tensor:
        """Feed each sequence its token in decode step `number` -> logits [B, V], which the next call may overwrite.
        ended: the step before, as each sequence's method may know it; what the method decides because of it is done
        first. None at step 0."""


class SessionStep:
    """The engine's own step: one sequence, whose session decides and moves on the host."""

    def __init__(self, loaded: LoadedModel, session: Session, cache: SessionCache, seat: Seat | None = None) -> None:
        """seat: computes steps together with other runs'; None: alone. A method that looks a layer ahead decodes
        alone."""
        self.loaded, self.model, self.session, self.cache = loaded, loaded.model, session, cache
        self.seat, self.others_ns = None if session.needs.ahead else seat, 0
        self.most_rows = 1
        """runs whose steps were computed together, at most, this one included"""
        self.ahead: AbstractContextManager[object] = nullcontext()
        if session.needs.ahead:
            self.ahead = LookAhead(loaded.model, session, cache)

    def __call__(self, number: int, tokens: Sequence[int], ended: Sequence[StepEnd | None]) -> torch.Tensor:
        (token,), (previous,) = tokens, ended
        if self.session.observer is None:
            self.session.memory.discard()
        self.session.begin_step(number, previous)
        if self.seat is not None:
            start_ns = time.perf_counter_ns()
            row, took_ns, rows = self.seat.step(self.loaded, self.session, token)
            self.others_ns = time.perf_counter_ns() - start_ns - took_ns
            self.most_rows = max(self.most_rows, rows)
            return row
        fed = torch.tensor([[token]], device=self.model.device)
        with self.ahead:
            out = self.model(input_ids=fed, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits[:, -1]
        return logits


class Course:
    """One sequence from step to step: the token that is fed, and what its method is told of a step that has ended."""

    def __init__(
        self, prompt: Prompt, first_position: int, surprisal: float, decode: Callable[[list[int]], str]
    ) -> None:
        """first_position: position of the first token that is fed, the prompt's last; surprisal: its own, in nats."""
        self._first, self._stream = first_position, TokenStream(decode)
        self.token, self.text, self.surprisal = prompt.ids[-1], prompt.pieces[-1], surprisal
        self.logprobs: torch.Tensor | None = None
        """float32 [V], of the step that ended last; None before the first"""
        self.ended: StepEnd | None = None
        self.steps = 0
        """steps that have ended"""

    def produced(self, logits: torch.Tensor) -> torch.Tensor:
        """The step that was fed `token` has ended with logits [V] -> their logarithms of probabilities."""
        self.logprobs = logprobs = logits.float().log_softmax(-1)
        entropy, varentropy = entropies(logprobs)
        position = self._first + self.steps
        self.ended = StepEnd(self.steps, position, self.surprisal, entropy, varentropy, self.text)
        self.steps += 1
        return logprobs

    def feed(self, token: int) -> None:
        """`token` goes into the next step. Step 0 feeds the prompt's last token."""
        if self.logprobs is None:
            assert token == self.token, "step 0 feeds the prompt's last token"
            return
        self.token, self.text = token, self._stream.text(token)
        self.surprisal = -float(self.logprobs[token])


class DecodedSequence(Protocol):
    """A sequence for which `decode` makes steps; see kvlens.engine.loop.Generation."""

    course: Course
    result: Result
    compared_ns: int

    @property
    def full_kv_ns(self) -> int: ...
    def check(self) -> None: ...
    def scores(self, logits: torch.Tensor) -> torch.Tensor: ...
    def choose(self, logits: torch.Tensor) -> int: ...
    def take(self, logits: torch.Tensor, token: int, start_ns: int, end_ns: int) -> None: ...


def decode(step: Step, generations: Sequence[DecodedSequence]) -> None:
    """Make steps until every generation has ended, into their results. A sequence that ends before the others is fed on
    with them, and nothing more is taken of it. Raises Cancelled between two steps; whoever is asked about that may take
    their time, which is no part of the loop's."""
    start_time, number, stood_ns = time.perf_counter(), 0, 0
    going = list(generations)
    while going:
        asking = time.perf_counter_ns()
        for generation in going:
            generation.check()
        stood_ns += time.perf_counter_ns() - asking
        courses = [generation.course for generation in generations]
        step_start_ns = time.perf_counter_ns()
        logits = step(number, [course.token for course in courses], [course.ended for course in courses])
        step_start_ns, stood_ns = step_start_ns + step.others_ns, stood_ns + step.others_ns
        rows = [generation.scores(row) for generation, row in zip(generations, logits, strict=True)]
        next_tokens = [generation.choose(row) for generation, row in zip(generations, rows, strict=True)]
        ended, number = time.perf_counter_ns(), number + 1
        for generation, row, token in zip(generations, rows, next_tokens, strict=True):
            if generation.result.stopped:
                generation.course.feed(token)
            else:
                generation.take(row, token, step_start_ns, ended)
        going = [generation for generation in going if not generation.result.stopped]
    took = time.perf_counter() - start_time - stood_ns / 1e9
    for generation in generations:
        generation.result.decode_s = took - (generation.compared_ns + generation.full_kv_ns) / 1e9


def entropies(logprobs: torch.Tensor) -> tuple[float, float]:
    """Mean and variance of -log p, in nats and nats squared: the entropy of a distribution and its varentropy. logprobs
    [V]."""
    p = logprobs.exp()
    entropy = -(p * logprobs).nan_to_num(0.0).sum()
    spread = (p * (logprobs + entropy).square()).nan_to_num(0.0).sum()
    return float(entropy), float(spread)
