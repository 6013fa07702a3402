"""A model in memory with a prompt, and runs of it that become stored traces."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens import __version__, methods
from kvlens.runs.machine import machine
from kvlens.memory.budget import Budget
from kvlens.memory.holds import Hold
from kvlens.prompts import Prompt, PromptText
from kvlens.runs.request import SMALL, Report, RunRequest, default_budget, default_preset
from kvlens.shortage import shortage

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference
    from kvlens.engine.engine import Engine, Options, Result
    from kvlens.methods.base import Method


@dataclass(frozen=True)
class Prepared:
    """A loaded model and a tokenized prompt: what all runs of one request share."""

    engine: Engine
    prompt: Prompt
    fingerprint: str
    """of the model, see kvlens.runs.fingerprint"""


@dataclass(frozen=True)
class Plan:
    """A request, checked: the method with its parameters, the limit and the engine's options."""

    method: type[Method]
    preset: str | None
    params: Any
    budget: Budget
    options: Options


@dataclass(frozen=True)
class Stored:
    """A run that has been stored."""

    uid: str
    status: str
    text: str
    result: Result | None
    """None: cancelled"""


@dataclass(frozen=True)
class Pairing:
    """What a run has to do with other runs, for its meta; all of it absent for a plain run."""

    reference: Reference | None = None
    """compared with, step by step"""
    reference_uid: str | None = None
    reference_key: str = ""
    parent: str | None = None
    """uid of the run this one repeats"""
    holds: Sequence[Hold] = ()


def check(request: RunRequest) -> tuple[type[Method], str | None, Any, Budget]:
    """(method, preset, parameters, budget) of a request, before anything is loaded. Raises ValueError with one
    sentence."""
    method = methods.get(request.method)
    preset = request.preset or default_preset(request.method, request.model)
    params = methods.make_parameters(method, preset, dict(request.overrides))
    return method, preset, params, Budget.parse(request.budget or default_budget(request.method))


def plan(request: RunRequest, forced: tuple[int, ...] | None = None) -> Plan:
    """A request with the tokens it is to be fed, if any. The device is divided for the request's own number of steps
    either way."""
    from kvlens.engine.engine import Options

    options = Options(
        max_new=request.max_new, seed=request.seed, temperature=request.temperature, top_p=request.top_p, stop=request.stop,
        ignore_eos=request.ignore_eos, prefill_chunk=request.prefill_chunk, top_k=request.top_k, coverage=request.coverage,
        oracle=request.oracle, forced=request.forced if forced is None else forced, planned=None if forced is None else request.max_new,
    )
    return Plan(*check(request), options)


def prepare(request: RunRequest, source: PromptText, report: Report) -> Prepared:
    """Load the model and tokenize the prompt. Raises ValueError with one sentence."""
    check(request)
    report("load", 0, 1)
    from kvlens.engine.engine import Engine
    from kvlens.engine.models import load
    from kvlens.runs.fingerprint import fingerprint
    from kvlens.prompts import tokenize

    try:
        loaded = load(request.model, request.device, request.dtype)
    except Exception as failure:
        short = shortage(failure, "load")
        if short is None:
            raise
        raise short from failure
    steps = len(request.forced) if request.forced is not None else request.max_new
    prompt = tokenize(source, loaded.tokenizer, loaded.max_positions, steps)
    if request.threads or loaded.info["parameters"] < SMALL:
        import torch

        torch.set_num_threads(request.threads or 1)
    prepared = Prepared(Engine(loaded), prompt, fingerprint(loaded))
    report("load", 1, 1)
    return prepared


def store(
    prepared: Prepared, request: RunRequest, planned: Plan, pairing: Pairing, runs_dir: Path, report: Report,
    cancelled: Callable[[], bool], conclude: Callable[[Result], dict[str, Any]] = lambda result: {}, keep_logits: bool = False,
) -> Stored:
    """Run and store. `conclude`: more meta, from what came out, before the trace is closed.

    Raises ValueError when nothing could be decoded; nothing is stored then. Raises Shortage when the machine has too
    little memory or lacks a feature: the run is stored as failed then. Raises the store's TraceError when the trace
    cannot be written.
    """
    from kvlens.engine.engine import Cancelled
    from kvlens.store.writer import TraceWriter

    engine, prompt = prepared.engine, prepared.prompt
    writer = TraceWriter(runs_dir, trace_level=request.trace_level)
    sink = _LateSink(writer, _meta(request, planned, pairing, prepared))
    status, error, checks = "completed", None, []
    extra: dict[str, Any] = {}
    result: Result | None = None
    phases = ["prefill"]  # the one that was reported last

    def tell(phase: str, done: int, total: int) -> None:
        phases[0] = phase
        report(phase, done, total)

    try:
        result = engine.run(
            prompt, planned.method, planned.params, planned.budget, planned.options, sink, tell, cancelled,
            keep_logits, against=pairing.reference, holds=pairing.holds,
        )
        checks = result.checks
        extra = {
            "output_text": result.text, "stopped": result.stopped, "prefill_s": round(result.prefill_s, 4),
            "decode_s": round(result.decode_s, 4), "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "kernels": result.kernels, "link_host_wait_s": round(result.link_host_wait_s, 6), **conclude(result),
        }
    except Cancelled as stopped:
        status, error, checks = "cancelled", "Cancelled by the user.", stopped.checks
    except Exception as failure:
        short = shortage(failure, "decode" if sink.begun else phases[0])
        if short is not None:
            sink.begin_anyhow()  # the prompt was right and the machine too small: that is a run that failed
        if sink.begun:
            said = f"{type(failure).__name__}: {failure}" if short is None else str(short)
            writer.finish("failed", said, [], {"output_text": sink.text()})
        if short is not None:
            raise short from failure
        raise
    if not sink.begun:
        raise ValueError("cancelled before anything was decoded.")
    report("store", 0, 1)
    writer.finish(status, error, checks, extra or {"output_text": sink.text()})
    report("store", 1, 1)
    return Stored(writer.uid, status, str(extra.get("output_text", sink.text())), result)


class _LateSink:
    """Begins the trace when prefill has succeeded, so that a refused run leaves nothing behind."""

    def __init__(self, writer: Any, meta: dict[str, Any]) -> None:
        self._writer, self._meta, self.begun = writer, meta, False
        self._pieces: list[str] = []

    def begin(self, meta: dict[str, Any]) -> None:
        raise AssertionError("the run's meta is given once, when the sink is made")

    def begin_anyhow(self) -> None:
        """Begin the trace of a run that got no further."""
        if not self.begun:
            self._writer.begin(self._meta)
            self.begun = True

    def prefill(self, record: Any) -> None:
        self.begin_anyhow()
        self._writer.prefill(record)

    def step(self, record: Any) -> None:
        self._pieces.append(record.text)
        self._writer.step(record)

    def finish(self, *args: Any) -> None:
        self._writer.finish(*args)

    def text(self) -> str:
        """What was generated so far, token by token."""
        return "".join(self._pieces)


def _meta(request: RunRequest, planned: Plan, pairing: Pairing, prepared: Prepared) -> dict[str, Any]:
    import torch
    import transformers

    from kvlens.kernels.attend import planned_on
    from kvlens.memory.link import link_name

    loaded, prompt, params = prepared.engine.loaded, prepared.prompt, planned.params
    context = prepared.engine.context(prompt, planned.budget, planned.options)
    oracle = prepared.engine.sampling(prompt, planned.options)
    shape, source = context.shape, prompt.source
    ours = {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.metadata.get("ours")}
    return {
        "kvlens": __version__, "torch": torch.__version__, "transformers": transformers.__version__, "model": request.model,
        "model_info": loaded.info, "model_fingerprint": prepared.fingerprint, "device": request.device, "dtype": request.dtype,
        "method": request.method, "preset": planned.preset, "config": dataclasses.asdict(params), "own_decisions": ours,
        "budget": request.budget or default_budget(request.method), "budget_bytes": context.budget_bytes,
        "prompt_tokens": len(prompt.ids), "max_new": context.max_new, "seed": request.seed, "temperature": request.temperature,
        "top_p": request.top_p, "forced": planned.options.forced is not None, "layers": shape.layers, "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "token_bytes": shape.token_bytes,
        "full_kv_bytes": context.full_kv_bytes, "link": link_name(context.device), "kernels": planned_on(context.device, shape.head_dim),
        "task": source.task, "answer": source.answer,
        "needle": [list(pair) for pair in source.needle], "prompt_text": source.text, "coverage": request.coverage,
        "oracle": None if oracle is None else oracle.meta(),
        "request": request.model_dump(mode="json", exclude={"forced", "hold"}), "reference": pairing.reference_uid,
        "reference_key": pairing.reference_key, "parent": pairing.parent, "hold": [hold.as_meta() for hold in pairing.holds],
        "whatif": None, "machine": machine(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
