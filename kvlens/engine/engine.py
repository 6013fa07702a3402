"""Runs a prompt through a model under a method: chunked prefill, then an explicit decode loop, free or forced.

Prefill covers the prompt without its last token; step 0 feeds that token, so every generated token comes out of a
decode step under the method. A method may see that token's query, key and value before (`Needs.peek`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvlens import interrupts
from kvlens.budget import Budget
from kvlens.engine.batch import Seat
from kvlens.engine.comparison import Reference
from kvlens.engine.hf_attention import SessionCache, forms_of
from kvlens.engine.loop import Generation
from kvlens.engine.models import LoadedModel
from kvlens.engine.observed import with_windows
from kvlens.engine.options import Cancelled, Options, Progress, Result
from kvlens.engine.prefill import Reader, ReadPrompt, prefill
from kvlens.engine.rotary import refuse_border, rotary_of, whole_length
from kvlens.engine.session import Session
from kvlens.holds import Drop, Hold, check
from kvlens.methods.base import Method
from kvlens.methods.full import FullKV
from kvlens.methods.hooks import Needs
from kvlens.methods.run_inputs import RunContext
from kvlens.recording.facts import Follower
from kvlens.recording.sampling import OracleSampling, resolve
from kvlens.records import TraceSink
from kvlens.text.prompts import Prompt
from kvlens.text.segments import QUESTION

__all__ = ["Cancelled", "Engine", "Options", "Progress", "Result"]


class Engine:
    """One model, many runs, one at a time."""

    def __init__(self, loaded: LoadedModel, seat: Seat | None = None) -> None:
        """seat: a place among runs whose steps are computed together; None: runs decode alone."""
        self.loaded, self.seat = loaded, seat

    def seated(self, seat: Seat | None) -> Engine:
        """Return the model's engine at a place among runs."""
        return Engine(self.loaded, seat)

    def context(self, prompt: Prompt, budget: Budget | None, options: Options) -> RunContext:
        """What a method may know of this run. Full KV counts the prompt and the steps that were planned, those that
        feed a question included. Raises ValueError when the run has more steps."""
        loaded, model = self.loaded, self.loaded.model
        steps = options.divided(len(prompt.asked))
        tokens = len(prompt.ids) + steps
        whole, fed = len(prompt.ids) + len(prompt.asked), len(prompt.ids) + options.steps(len(prompt.asked)) - 1
        shape = loaded.shape.bound(fed)
        refuse_border(model.config, whole, fed)
        limit = None if budget is None else budget.bytes(loaded.shape, tokens)
        return RunContext(
            shape,
            len(prompt.ids) - 1,
            steps,
            limit,
            loaded.shape.full_kv_bytes(tokens),
            options.seed,
            loaded.name,
            model.dtype,
            model.device,
            prompt.pieces,
            rotary_of(model),
            forms=forms_of(model, shape),
            question_from=next((part.start for part in prompt.segments if part.name == QUESTION), None),
            segments=tuple((part.name, part.start, part.end) for part in prompt.segments),
        )

    def whole(self, prompt: Prompt) -> AbstractContextManager[None]:
        """Rotary frequencies as `generate` computes them for this prompt and its question."""
        return whole_length(self.loaded.model, len(prompt.ids) + len(prompt.asked))

    def sampling(self, prompt: Prompt, options: Options) -> OracleSampling | None:
        """At which steps and layers full attention by span is recorded. Raises ValueError with one sentence."""
        shape = self.loaded.shape
        return resolve(options.oracle, shape.layers, shape.q_heads, len(prompt.ids), options.coverage)

    @torch.inference_mode()
    def read(
        self,
        prompt: Prompt,
        prefill_chunk: int = 512,
        queries: int = 128,
        received: bool = False,
        progress: Progress = lambda phase, done, total: None,
    ) -> ReadPrompt:
        """Prefill once for many runs: keeps copies of keys, values, the last `queries` queries and what peeking sees,
        for methods of any needs; received: for methods with `Needs.received`, too."""
        options = Options(max_new=1, prefill_chunk=prefill_chunk)
        needs = Needs(queries=queries, peek=True, received=received)
        session = Session(FullKV, FullKV.Parameters(), self.context(prompt, None, options), needs)
        try:
            with self.whole(prompt):
                surprisal = prefill(
                    self.loaded,
                    prompt,
                    session,
                    SessionCache(session, self.loaded.shape.layers),
                    prefill_chunk,
                    lambda count, total: progress("prefill", count, total),
                )
            keys, values, queries_read, peeked, sums = session.observed.read()
            return ReadPrompt(prompt.ids, keys, values, queries_read, peeked, surprisal, sums)
        finally:
            session.close()

    @torch.inference_mode()
    @interrupts.watched()
    @interrupts.interruptible()
    def rehearse(
        self,
        prompt: Prompt,
        method: type[Method],
        params: Any,
        budget: Budget | None,
        options: Options,
        progress: Progress = lambda phase, done, total: None,
        cancelled: Callable[[], bool] = lambda: False,
        holds: Sequence[Hold] = (),
        drops: Sequence[Drop] = (),
        read: Reader | None = None,
    ) -> None:
        """Raise what `run` would raise before it decodes anything; nothing stays of it. A method whose floor is
        arithmetic costs no prefill here; another places the prompt. read: what reads the prompt; None: the model does,
        for this rehearsal alone."""
        context = self.context(prompt, budget, options)
        if holds or drops:
            check(holds, drops, context.shape, context.prompt_tokens + context.max_new)
        self.sampling(prompt, options)
        session = Session(method, params, context, holds=holds, drops=drops)
        try:
            if method.floor_is_exact:
                method_run = session.method.context
                with with_windows(context, session.reference):
                    session.method.refuse_below(
                        method.floor_bytes(params, method_run.shape, method_run.prompt_tokens, method_run.max_new)
                    )
            else:
                with self.whole(prompt):
                    Generation(self.loaded, prompt, session, options, None, progress, cancelled).place(read)
        finally:
            session.close()

    @torch.inference_mode()
    @interrupts.watched()
    @interrupts.interruptible()
    def run(
        self,
        prompt: Prompt,
        method: type[Method],
        params: Any,
        budget: Budget | None = None,
        options: Options | None = None,
        sink: TraceSink | None = None,
        progress: Progress = lambda phase, done, total: None,
        cancelled: Callable[[], bool] = lambda: False,
        keep_logits: bool = False,
        read: ReadPrompt | Reader | None = None,
        against: Reference | None = None,
        holds: Sequence[Hold] = (),
        follow: Follower | None = None,
        drops: Sequence[Drop] = (),
    ) -> Result:
        """Generate. With a sink every decision is logged, without effect on the result. `read`: this very prompt, read
        before, or what reads it, which is timed as this run's prefill; a method that reads under attention of its own
        leaves a ReadPrompt to full KV beside the run. `against`: the full-KV run of this prompt; every
        step is compared with it while both have chosen the same tokens. `holds`: what is kept exactly on the device
        beside what the method keeps; its bytes raise the budget by themselves. `follow`: sees steps before they are
        measured. `drops`: what is not attended, whatever the method does; it changes no byte.

        Raises BudgetInfeasible before anything is decoded, Cancelled between tokens, ValueError for a reference of
        another model or a hold or drop on what the run does not have, and whatever the sink raises.
        """
        options = options or Options()
        context = self.context(prompt, budget, options)
        if holds or drops:
            check(holds, drops, context.shape, context.prompt_tokens + context.max_new)
        oracle = self.sampling(prompt, options)
        session = Session(method, params, context, holds=holds, drops=drops)
        session.method.keeps_journal = sink is not None
        run = Generation(
            self.loaded, prompt, session, options, sink, progress, cancelled, keep_logits, against, oracle, follow
        )
        try:
            with self.whole(prompt):
                try:
                    return run.go(read, self.seat)
                except Cancelled as stopped:
                    stopped.checks = run.stop_recording()
                    raise
                finally:
                    run.stop_recording()
        finally:
            session.close()
