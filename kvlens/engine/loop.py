"""One prompt on its way through a model: what comes before the first step, and what each step is to the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from kvlens.engine.alongside import Alongside, full_kv_beside
from kvlens.engine.batch import Seat
from kvlens.engine.comparison import Comparison, Reference
from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.models import LoadedModel
from kvlens.engine.options import Cancelled, GenerationRules, Options, Progress, Result
from kvlens.engine.prefill import Reader, ReadPrompt, prefill
from kvlens.engine.second_reading import read_again
from kvlens.engine.session import Session
from kvlens.engine.steps import Course, SessionStep, decode
from kvlens.instruments import PhaseClock
from kvlens.methods.base import own_method
from kvlens.recording.facts import Follower
from kvlens.recording.recorder import Recorder, StepFacts
from kvlens.recording.sampling import OracleSampling
from kvlens.recording.selfcheck import Tally
from kvlens.records import SelfCheck, TraceSink
from kvlens.rows import PromptToken
from kvlens.text.plaintext import token_text
from kvlens.text.prompts import Prompt


class Generation:
    """One prompt on its way: read and placed, then told of every step that the loop makes for it. It chooses or forces
    the next token, stops, compares with a reference, records."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: Prompt,
        session: Session,
        options: Options,
        sink: TraceSink | None = None,
        progress: Progress = lambda phase, done, total: None,
        cancelled: Callable[[], bool] = lambda: False,
        keep_logits: bool = False,
        against: Reference | None = None,
        oracle: OracleSampling | None = None,
        follow: Follower | None = None,
    ) -> None:
        """sink: where the recorder's rows go; None: nothing is recorded. follow: see Recorder."""
        self.loaded, self.prompt, self.session, self.options = loaded, prompt, session, options
        self.progress, self.cancelled, self.keep_logits = progress, cancelled, keep_logits
        self.decode: Callable[[list[int]], str] = loaded.tokenizer.decode
        pieces = partial(token_text, loaded.tokenizer)
        self.comparison = None if against is None else Comparison(against, loaded.model.config.vocab_size, pieces)
        self.cache = SessionCache(session, loaded.shape.layers)
        self.sink, self.oracle, self.follow = sink, oracle, follow
        self.tally = Tally(loaded.shape, session.transfers, session.account)
        self.recorder: Recorder | None = None
        """None: the prompt has not been placed, or nothing is recorded"""
        self.generator = torch.Generator().manual_seed(options.seed)
        self.zero = session.transfers.zero_ns
        self.compared_ns = 0
        """spent on comparing with the reference, which is no part of any step"""
        self.full_kv: Alongside | None = None
        """None: full KV's own attention is not recorded"""
        self.asked = len(prompt.asked)
        """steps that feed a question, before the run chooses for itself"""
        self.rules = GenerationRules(loaded.model, len(prompt.ids) + self.asked, options.max_new)
        self.course: Course
        self.result: Result

    def go(self, read: ReadPrompt | Reader | None, seat: Seat | None = None) -> Result:
        """Prefill (or take the prompt that was read before) and decode, step by step through the session or a seat."""
        self.place(read)
        self.progress("decode", 0, self.steps)
        step, result = SessionStep(self.loaded, self.session, self.cache, seat), self.result
        decode(step, [self])
        self.session.border.end()
        self.session.border.count_held(self.session.account)
        result.unannounced_bytes, result.most_rows = self.session.border.holdings.bytes, step.most_rows
        result.text = self.loaded.decode(result.ids[self.asked :])
        if self.follow is not None:
            self.follow.decoded(result.text)
            self.cancelled()  # the other lanes of a race decode before the last steps of this one are measured
        result.checks = self.stop_recording()
        result.kernels = "+".join(sorted(self.session.kernels))
        result.link_host_wait_s = self.session.memory.host_wait_ns / 1e9
        if self.full_kv is not None:
            result.full_kv_s, result.no_full_kv = self.full_kv_ns / 1e9, self.full_kv.why or result.no_full_kv
        return result

    @property
    def full_kv_ns(self) -> int:
        """Spent so far on full KV beside the run, which is no part of any step."""
        return 0 if self.recorder is None else self.recorder.full_kv_ns

    @property
    def steps(self) -> int:
        """At most."""
        return self.options.steps(self.asked)

    def stop_recording(self) -> list[SelfCheck]:
        """Let the steps in flight reach the sink, also when the run ends early; the self-checks of what was recorded.
        Raises what the sink raised."""
        if self.recorder is not None:
            self.recorder.finish()
        return [] if self.sink is None else self.tally.checks()

    # ----------------------------------------------------------------------------------------------- before the steps
    def place(self, read: ReadPrompt | Reader | None) -> None:
        """All that comes before the first step. A prompt that was read before is read again by a method that reads
        under attention of its own; what was read serves full KV beside the run then. Raises BudgetInfeasible,
        Cancelled."""
        session, start_time = self.session, time.perf_counter()
        if read is None or session.needs.own_prompt:
            surprisal = prefill(
                self.loaded,
                self.prompt,
                session,
                self.cache,
                self.options.prefill_chunk,
                lambda count, total: self.progress("prefill", count, total),
                self.check,
                self.sink is not None or session.needs.surprisal,
            )
        else:
            read = read if isinstance(read, ReadPrompt) else read()
            assert read.ids == self.prompt.ids
            queries = read.last_queries, read.peeked, read.received
            session.observed.adopt(read.keys, read.values, *queries, share=own_method(type(session.method)))
            surprisal = read.surprisal
            start_time -= read.ahead_ns / 1e9
            session.transfers.zero_ns -= read.ahead_ns
            self.zero = session.transfers.zero_ns
        second = read_again(self, read) if session.needs.second is not None else (0, 0.0)
        n, last, store = session.context.prompt_tokens, surprisal.last, session.prompt
        nats = surprisal.whole()[:n] if session.needs.surprisal else None
        self.progress("place", 0, 1)
        prefill_us = (time.perf_counter_ns() - self.zero) // 1000
        session.finish_prefill(nats)
        prefill_s = time.perf_counter() - start_time  # without the time that the beginning of a trace takes
        self.course = Course(self.prompt, n, last, self.decode)
        self.result = Result([], "", surprisal, [], "", prefill_s, 0.0, [], 0, [], second_reading=second)
        if self.sink is not None and store is not None:
            if self.comparison is not None and self.oracle is not None:
                full_prompt = read if isinstance(read, ReadPrompt) else None if session.needs.reading else store
                beside = full_kv_beside(self.loaded, self.prompt, full_prompt, self.steps)
                self.full_kv, self.result.no_full_kv = beside
            self.recorder = Recorder(
                session.memory,
                session.windowed,
                session.method,
                self.sink,
                self.tally,
                store.keys,
                session.context.max_new,
                self.options.top_k,
                self.options.coverage,
                self.oracle,
                self.follow,
                self.full_kv,
                session.context,
            )
            session.observer = self.recorder.freezer
            if self.options.phases and store.keys.device.type == "cpu":
                session.clock = session.memory.log.clock = PhaseClock()
            self.recorder.prefill(self._prompt_tokens(surprisal.known), prefill_us, session.prefill_peak)

    def _prompt_tokens(self, surprisal: torch.Tensor | None) -> list[PromptToken]:
        """Surprisals that nobody has asked for yet are not recorded yet."""
        p, nats = self.prompt, [None] * len(self.prompt.ids) if surprisal is None else surprisal.tolist()
        return [
            PromptToken(i, token, piece, o[0] if o else None, o[1] if o else None, None if i == 0 else nats[i])
            for i, (token, piece, o) in enumerate(zip(p.ids, p.pieces, p.offsets, strict=True))
        ]

    # ----------------------------------------------------------------------------------------------- called by the loop
    def check(self) -> None:
        """Raises Cancelled where the caller asked to stop."""
        if self.cancelled():
            raise Cancelled

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [V] of the step that ended, after the rules of the model's generation_config. Raises
        NonFiniteLogits."""
        return self.rules.scores(logits, [*self.prompt.ids, *self.result.ids], self.course.steps)

    def choose(self, logits: torch.Tensor) -> int:
        """A step has produced logits [V] -> the token that the next one is fed; after the end, the last one again."""
        options, logprobs = self.options, self.course.produced(logits)
        if self.result.stopped:
            return self.course.token
        if options.forced is not None:
            return options.forced[self.course.steps - 1]
        if self.course.steps <= self.asked:
            return self.prompt.asked[self.course.steps - 1]
        if options.temperature == 0:
            return int(logprobs.argmax())
        p = (logprobs / options.temperature).softmax(-1).cpu()
        if options.top_p < 1:
            ordered, index = p.sort(descending=True)
            ordered[ordered.cumsum(-1) - ordered >= options.top_p] = 0
            p = torch.zeros_like(p).scatter_(0, index, ordered)
        return int(torch.multinomial(p, 1, generator=self.generator))

    def take(self, logits: torch.Tensor, token: int, start_ns: int, end_ns: int) -> None:
        """The step that produced logits [V], and after which `token` was chosen, took from start_ns to end_ns of
        the performance counter."""
        result, step, previous = self.result, self.course.steps - 1, self.course.ended
        assert previous is not None
        loss = None
        if self.comparison is not None and step < self.asked:
            result.losses.append(None)  # what a model would have said in place of the question is no loss
        elif self.comparison is not None:
            comparing = time.perf_counter_ns()
            loss = self.comparison.step(step, logits.float(), token)
            result.losses.append(loss)
            self.compared_ns += time.perf_counter_ns() - comparing
        self.course.feed(token)
        logprob, text = -self.course.surprisal, self.course.text
        result.ids.append(token)
        result.logprobs.append(logprob)
        result.step_s.append((end_ns - start_ns) / 1e9)
        result.peak_bytes = max(result.peak_bytes, self.session.memory.account.peak)
        if self.keep_logits:
            result.logits.append(logits.float().clone())
        phases = self.session.clock.take(end_ns - start_ns)
        if self.recorder is not None:
            start_us, took = (start_ns - self.zero) // 1000, (end_ns - start_ns) // 1000
            facts = StepFacts(step, start_us, took, token, text, logprob, previous.next_entropy, loss, phases)
            self.recorder.step(facts, previous.position)
        self.progress("decode", step + 1, self.steps)
        result.stopped = self._stopped_by(token)

    def _stopped_by(self, token: int) -> str:
        """Why the output ends with this token, as Result.stopped has it; empty: it goes on."""
        options, ids = self.options, self.result.ids[self.asked :]
        if not ids:
            return ""
        if options.forced is None:
            if token in self.loaded.eos and not options.ignore_eos:
                return "eos"
            if options.stop and any(text in self.decode(ids) for text in options.stop):
                return "stop"
        if self.asked + len(ids) < self.steps:
            return ""
        return "length" if options.forced is None else "forced"
