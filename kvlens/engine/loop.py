"""One generation: prefill, then a decode loop that feeds one token per step, chosen or forced."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvlens.engine.comparison import Comparison, Reference
from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.models import LoadedModel
from kvlens.engine.prefill import ReadPrompt, prefill
from kvlens.engine.session import Session
from kvlens.methods.base import StepEnd
from kvlens.prompts import Prompt
from kvlens.recording.recorder import Recorder, StepFacts
from kvlens.recording.sampling import OracleSampling
from kvlens.rows import Loss, PromptToken, SelfCheck, TraceSink

Progress = Callable[[str, int, int], None]
"""phase ('prefill' | 'place' | 'decode'), done, total (tokens)"""


class Cancelled(Exception):
    """The caller asked to stop; what was recorded so far is kept, with its self-checks."""

    def __init__(self) -> None:
        super().__init__("cancelled")
        self.checks: list[SelfCheck] = []


@dataclass(frozen=True)
class Options:
    """How to generate and what to log. temperature 0 is greedy; top_p and seed matter above it."""

    max_new: int = 64
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """stop after the token with which the output contains one of these"""
    ignore_eos: bool = False
    """go on to max_new tokens whatever comes"""
    prefill_chunk: int = 512
    """tokens; 0: the whole prompt at once"""
    forced: tuple[int, ...] | None = None
    """token ids to feed instead of the method's own choices; the run has as many steps"""
    planned: int | None = None
    """decode steps that the device is divided for; None: as many as the run can have. A forced repeat of a run that was
    to have more steps than it came to needs the run's number: budget and zones depend on it"""
    top_k: int = 16
    coverage: bool = False
    oracle: str = "auto"
    """at which steps and layers full attention by span is recorded, see kvlens.recording.sampling; nothing without
    coverage"""

    def __post_init__(self) -> None:
        if self.max_new < 1:
            raise ValueError("--max-new must be at least 1 token.")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError("temperature must be at least 0 and top_p in (0, 1].")
        if self.prefill_chunk < 0 or self.top_k < 1:
            raise ValueError("prefill_chunk must be at least 0 and top_k at least 1.")
        if self.forced is not None and not self.forced:
            raise ValueError("a forced run needs at least one token to feed.")
        if self.planned is not None and self.planned < self.steps:
            raise ValueError(f"the device is divided for {self.planned} steps, and the run has {self.steps}.")

    @property
    def steps(self) -> int:
        """Decode steps at most."""
        return len(self.forced) if self.forced is not None else self.max_new


@dataclass
class Result:
    """What came out. Times in seconds."""

    ids: list[int]
    text: str
    surprisal: torch.Tensor
    """float32 [prompt tokens], nats, NaN at position 0"""
    logprobs: list[float]
    stopped: str
    """eos | stop | length | forced"""
    prefill_s: float
    decode_s: float
    """of the whole loop, without the comparison with a reference"""
    step_s: list[float]
    peak_bytes: int
    """largest device-resident KV bytes inside any decode step"""
    checks: list[SelfCheck]
    logits: list[torch.Tensor] = field(default_factory=list)
    """float32 [V] per step, only when asked for"""
    losses: list[Loss | None] = field(default_factory=list)
    """per step, where a reference was given; None where the contexts differ"""
    kernels: str = ""
    """what attention ran on: torch, triton or both"""
    link_host_wait_s: float = 0.0
    """how long the host stood still for the link, the model's own waiting apart"""


class Generation:
    """The state of one generation. `sink`: where the recorder's rows go; None: nothing is recorded."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: Prompt,
        session: Session,
        options: Options,
        sink: TraceSink | None,
        progress: Progress,
        cancelled: Callable[[], bool],
        keep_logits: bool,
        against: Reference | None,
        oracle: OracleSampling | None = None,
    ) -> None:
        self.loaded, self.prompt, self.session, self.options = loaded, prompt, session, options
        self.progress, self.cancelled, self.keep_logits = progress, cancelled, keep_logits
        decode: Callable[[list[int]], str] = loaded.tokenizer.decode
        self.comparison = None if against is None else Comparison(against, loaded.model.config.vocab_size, decode)
        self.cache = SessionCache(session, loaded.shape.layers)
        self.recorder: Recorder | None = None
        if sink is not None:
            self.recorder = Recorder(session.memory, session.method, sink, options.top_k, options.coverage, oracle)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.zero = session.memory.ledger.zero_ns
        self.prefill_s = 0.0
        """how long `place` took, without the beginning of the trace"""

    def go(self, read: ReadPrompt | None) -> Result:
        """Prefill (or take the prompt that was read before) and decode."""
        surprisal = self.place(read)
        result = Result([], "", surprisal, [], "length", self.prefill_s, 0.0, [], 0, [])
        began = time.perf_counter()
        compared_s = self._decode(result)
        result.decode_s = time.perf_counter() - began - compared_s
        result.text = self.loaded.tokenizer.decode(result.ids, skip_special_tokens=True)
        result.checks = self.stop_recording()
        result.kernels = "+".join(sorted(self.session.kernels))
        result.link_host_wait_s = self.session.memory.link.host_wait_ns / 1e9
        return result

    def stop_recording(self) -> list[SelfCheck]:
        """Let the steps in flight reach the sink, also when the run ends early; the self-checks of what was recorded.
        Raises what the sink raised."""
        if self.recorder is None:
            return []
        self.recorder.finish()
        return self.recorder.checks()

    def place(self, read: ReadPrompt | None) -> torch.Tensor:
        """All that comes before the first step -> surprisal of every token. Raises BudgetInfeasible, Cancelled."""
        session, began = self.session, time.perf_counter()
        if read is None:
            surprisal = prefill(
                self.loaded,
                self.prompt,
                session,
                self.cache,
                self.options.prefill_chunk,
                lambda done, total: self.progress("prefill", done, total),
                self._check,
            )
        else:
            session.adopt(read.keys, read.values, read.last_queries, read.peeked, read.received)
            surprisal = read.surprisal
        n = len(self.prompt.ids) - 1
        prompt_keys = session.memory.prompt.keys if session.memory.prompt is not None else None
        if self.recorder is not None and prompt_keys is not None:
            self.recorder.prompt_keys(prompt_keys, session.context.max_new)
        self.progress("place", 0, 1)
        prefill_us = (time.perf_counter_ns() - self.zero) // 1000
        session.finish_prefill(surprisal[:n])
        self.prefill_s = time.perf_counter() - began
        if self.recorder is not None:
            self.recorder.prefill(self._prompt_tokens(surprisal), prefill_us, session.prefill_peak)
            session.observer = self.recorder
        return surprisal

    def _check(self) -> None:
        if self.cancelled():
            raise Cancelled

    def _prompt_tokens(self, surprisal: torch.Tensor) -> list[PromptToken]:
        p, nats = self.prompt, surprisal.tolist()
        return [
            PromptToken(i, token, piece, o[0] if o else None, o[1] if o else None, None if i == 0 else nats[i])
            for i, (token, piece, o) in enumerate(zip(p.ids, p.pieces, p.offsets, strict=True))
        ]

    def _decode(self, result: Result) -> float:
        """All steps, into `result`; the seconds that went into comparing with the reference, which are no part of any
        step."""
        session, options, compared_ns = self.session, self.options, 0
        steps = options.steps
        token, surprisal = self.prompt.ids[-1], float(result.surprisal[-1])
        text = self.prompt.pieces[-1]
        previous: StepEnd | None = None
        for step in range(steps):
            self._check()
            began = time.perf_counter_ns()
            session.begin_step(step, previous)
            fed = torch.tensor([[token]], device=self.loaded.model.device)
            logits = self.loaded.model(
                input_ids=fed, past_key_values=self.cache, use_cache=True, logits_to_keep=1
            ).logits[0, -1]
            logprobs = logits.float().log_softmax(-1)
            token = self._choose(step, logprobs)
            entropy, varentropy = entropies(logprobs)
            ended = time.perf_counter_ns()
            loss = None
            if self.comparison is not None:
                loss = self.comparison.step(step, logits.float(), token)
                result.losses.append(loss)
                compared_ns += time.perf_counter_ns() - ended
            previous = StepEnd(step, session.context.prompt_tokens + step, surprisal, entropy, varentropy, text)
            surprisal, text = -float(logprobs[token]), self.loaded.tokenizer.decode([token])
            result.ids.append(token)
            result.logprobs.append(-surprisal)
            result.step_s.append((ended - began) / 1e9)
            result.peak_bytes = max(result.peak_bytes, session.memory.account.peak)
            if self.keep_logits:
                result.logits.append(logits.float().clone())
            if self.recorder is not None:
                facts = StepFacts(
                    step, (began - self.zero) // 1000, (ended - began) // 1000, token, text, -surprisal, entropy, loss
                )
                self.recorder.step(facts, previous.position)
            self.progress("decode", step + 1, steps)
            if ended_by := self._ended_by(token, result.ids):
                result.stopped = ended_by
                return compared_ns / 1e9
        result.stopped = "length" if options.forced is None else "forced"
        return compared_ns / 1e9

    def _ended_by(self, token: int, ids: list[int]) -> str | None:
        """Why the output ends with this token; None: it goes on."""
        options = self.options
        if options.forced is not None:
            return None
        if token in self.loaded.eos and not options.ignore_eos:
            return "eos"
        if options.stop and any(text in self.loaded.tokenizer.decode(ids) for text in options.stop):
            return "stop"
        return None

    def _choose(self, step: int, logprobs: torch.Tensor) -> int:
        options = self.options
        if options.forced is not None:
            return options.forced[step]
        if options.temperature == 0:
            return int(logprobs.argmax())
        p = (logprobs / options.temperature).softmax(-1).cpu()
        if options.top_p < 1:
            ordered, index = p.sort(descending=True)
            ordered[ordered.cumsum(-1) - ordered >= options.top_p] = 0
            p = torch.zeros_like(p).scatter_(0, index, ordered)
        return int(torch.multinomial(p, 1, generator=self.generator))


def entropies(logprobs: torch.Tensor) -> tuple[float, float]:
    """Mean and variance of -log p, in nats and nats squared: the entropy of a distribution and its varentropy. logprobs
    [V]."""
    p = logprobs.exp()
    entropy = -(p * logprobs).nan_to_num(0.0).sum()
    spread = (p * (logprobs + entropy).square()).nan_to_num(0.0).sum()
    return float(entropy), float(spread)
