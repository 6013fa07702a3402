"""Runs a prompt through a model under a method: chunked prefill with surprisal, then an explicit decode loop, free or forced.

Prefill covers the prompt without its last token; step 0 feeds that token, so every generated token comes out of a decode step
under the method. Methods may ask to see that token's query, key and value before (`Method.peeks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlens.attention import SessionCache
from kvlens.budget import Budget
from kvlens.methods.base import Method, RunContext, StepEnd
from kvlens.methods.full import FullKV
from kvlens.models import LoadedModel
from kvlens.prefill import ReadPrompt, prefill
from kvlens.prompts import Prompt
from kvlens.recorder import Recorder, StepFacts
from kvlens.rotary import rotary_of
from kvlens.rows import PromptToken, SelfCheck, TraceSink
from kvlens.session import Session

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
    top_k: int = 16
    coverage: bool = False

    def __post_init__(self) -> None:
        if self.max_new < 1:
            raise ValueError("--max-new must be at least 1 token.")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError("temperature must be at least 0 and top_p in (0, 1].")
        if self.prefill_chunk < 0 or self.top_k < 1:
            raise ValueError("prefill_chunk must be at least 0 and top_k at least 1.")


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
    step_s: list[float]
    peak_bytes: int
    """largest device-resident KV bytes inside any decode step"""
    checks: list[SelfCheck]
    logits: list[torch.Tensor] = field(default_factory=list)
    """float32 [V] per step, only when asked for"""


class Engine:
    """One model, many runs, one at a time."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def context(self, prompt: Prompt, budget: Budget | None, options: Options) -> RunContext:
        """What a method may know of this run. Full KV counts prompt and max_new tokens."""
        loaded, model = self.loaded, self.loaded.model
        steps = len(options.forced) if options.forced is not None else options.max_new
        tokens = len(prompt.ids) + steps
        limit = None if budget is None else budget.bytes(loaded.shape, tokens)
        return RunContext(
            loaded.shape, len(prompt.ids) - 1, steps, limit, loaded.shape.full_kv_bytes(tokens), options.seed, loaded.name,
            model.dtype, model.device, prompt.pieces, rotary_of(model),
        )  # fmt: skip

    @torch.inference_mode()
    def read(self, prompt: Prompt, prefill_chunk: int = 512, queries: int = 128) -> ReadPrompt:
        """Prefill once for many runs: keeps copies of keys, values, the last `queries` queries and what peeking sees, whatever the
        methods will ask for. A method that watches the prompt go by (`prefill_layer`) cannot use it."""
        options = Options(max_new=1, prefill_chunk=prefill_chunk)
        session = Session(FullKV, FullKV.Parameters(), self.context(prompt, None, options), queries, peeks=True)
        try:
            surprisal = prefill(self.loaded, prompt, session, SessionCache(session, self.loaded.shape.layers), prefill_chunk)
            return ReadPrompt(prompt.ids, *session.read(), surprisal)
        finally:
            session.close()

    @torch.inference_mode()
    def run(
        self, prompt: Prompt, method: type[Method], params: Any, budget: Budget | None = None, options: Options | None = None,
        sink: TraceSink | None = None, progress: Progress = lambda phase, done, total: None,
        cancelled: Callable[[], bool] = lambda: False, keep_logits: bool = False, read: ReadPrompt | None = None,
    ) -> Result:  # fmt: skip
        """Generate. With a sink every decision is logged, without effect on the result. `read`: this very prompt, read before.

        Raises BudgetInfeasible before anything is decoded, Cancelled between tokens, and whatever the sink raises.
        """
        options = options or Options()
        assert read is None or read.ids == prompt.ids
        context = self.context(prompt, budget, options)
        session = Session(method, params, context)
        run = _Run(self.loaded, prompt, session, options, sink, progress, cancelled, keep_logits)
        try:
            return run.go(read)
        except Cancelled as stopped:
            stopped.checks = run.stop_recording()
            raise
        finally:
            run.stop_recording()
            session.close()


class _Run:
    """The state of one generation."""

    def __init__(
        self, loaded: LoadedModel, prompt: Prompt, session: Session, options: Options, sink: TraceSink | None, progress: Progress,
        cancelled: Callable[[], bool], keep_logits: bool,
    ) -> None:  # fmt: skip
        self.loaded, self.prompt, self.session, self.options = loaded, prompt, session, options
        self.progress, self.cancelled, self.keep_logits = progress, cancelled, keep_logits
        self.cache = SessionCache(session, loaded.shape.layers)
        self.recorder = None if sink is None else Recorder(session.memory, session.method, sink, options.top_k, options.coverage)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.zero = session.memory.ledger.zero_ns

    def go(self, read: ReadPrompt | None) -> Result:
        began = time.perf_counter()
        surprisal = self._prefill(read)
        prefill_s = time.perf_counter() - began
        result = Result([], "", surprisal, [], "length", prefill_s, 0.0, [], 0, [])
        began = time.perf_counter()
        self._decode(result)
        result.decode_s = time.perf_counter() - began
        result.text = self.loaded.tokenizer.decode(result.ids, skip_special_tokens=True)
        result.checks = self.stop_recording()
        return result

    def stop_recording(self) -> list[SelfCheck]:
        """Let the steps in flight reach the sink, also when the run ends early; the self-checks of what was recorded.

        Raises what the sink raised.
        """
        if self.recorder is None:
            return []
        self.recorder.finish()
        return self.recorder.checks()

    def _prefill(self, read: ReadPrompt | None) -> torch.Tensor:
        session = self.session
        if read is None:
            surprisal = prefill(
                self.loaded, self.prompt, session, self.cache, self.options.prefill_chunk,
                lambda done, total: self.progress("prefill", done, total), self._check,
            )  # fmt: skip
        else:
            session.adopt(read.keys, read.values, read.last_queries, read.peeked)
            surprisal = read.surprisal
        n = len(self.prompt.ids) - 1
        prompt_keys = session.memory.prompt.keys if session.memory.prompt is not None else None
        if self.recorder is not None and prompt_keys is not None:
            self.recorder.prompt_keys(prompt_keys, session.context.max_new)
        self.progress("place", 0, 1)
        prefill_us = (time.perf_counter_ns() - self.zero) // 1000
        session.finish_prefill(surprisal[:n])
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

    def _decode(self, result: Result) -> None:
        session, options = self.session, self.options
        steps = session.context.max_new
        token, surprisal = self.prompt.ids[-1], float(result.surprisal[-1])
        text = self.prompt.pieces[-1]
        previous: StepEnd | None = None
        for step in range(steps):
            self._check()
            began = time.perf_counter_ns()
            session.begin_step(step, previous)
            fed = torch.tensor([[token]], device=self.loaded.model.device)
            logits = self.loaded.model(input_ids=fed, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            logprobs = logits.float().log_softmax(-1)
            token = self._choose(step, logprobs)
            entropy, varentropy = entropies(logprobs)
            ended = time.perf_counter_ns()
            previous = StepEnd(step, session.context.prompt_tokens + step, surprisal, entropy, varentropy, text)
            surprisal, text = -float(logprobs[token]), self.loaded.tokenizer.decode([token])
            result.ids.append(token)
            result.logprobs.append(-surprisal)
            result.step_s.append((ended - began) / 1e9)
            result.peak_bytes = max(result.peak_bytes, session.memory.account.peak)
            if self.keep_logits:
                result.logits.append(logits.float().clone())
            if self.recorder is not None:
                facts = StepFacts(step, (began - self.zero) // 1000, (ended - began) // 1000, token, text, -surprisal, entropy)
                self.recorder.step(facts, previous.position)
            self.progress("decode", step + 1, steps)
            if options.forced is not None:
                continue
            if token in self.loaded.eos and not options.ignore_eos:
                result.stopped = "eos"
                return
            if options.stop and any(text in self.loaded.tokenizer.decode(result.ids) for text in options.stop):
                result.stopped = "stop"
                return
        result.stopped = "length" if options.forced is None else "forced"

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
    """Mean and variance of -log p, in nats and nats squared: the entropy of a distribution and its varentropy. logprobs [V]."""
    p = logprobs.exp()
    entropy = -(p * logprobs).nan_to_num(0.0).sum()
    spread = (p * (logprobs + entropy).square()).nan_to_num(0.0).sum()
    return float(entropy), float(spread)
