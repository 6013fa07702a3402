"""What a run needs before it can begin: a model in memory with a prompt, a checked plan, its part in a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens import methods
from kvlens.memory.budget import Budget
from kvlens.memory.holds import Hold
from kvlens.methods import calibration
from kvlens.prompts import Prompt, PromptText
from kvlens.runs.request import SMALL, Report, RunRequest, default_budget, default_preset
from kvlens.shortage import shortage

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference
    from kvlens.engine.engine import Engine, Options
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
    calibration.require(method, params, request.model)
    return method, preset, params, Budget.parse(request.budget or default_budget(request.method))


def plan(request: RunRequest, forced: tuple[int, ...] | None = None) -> Plan:
    """A request with the tokens it is to be fed, if any. The device is divided for the request's own number of steps
    either way."""
    from kvlens.engine.engine import Options

    options = Options(
        max_new=request.max_new,
        seed=request.seed,
        temperature=request.temperature,
        top_p=request.top_p,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        prefill_chunk=request.prefill_chunk,
        top_k=request.top_k,
        coverage=request.coverage,
        oracle=request.oracle,
        forced=request.forced if forced is None else forced,
        planned=None if forced is None else request.max_new,
    )
    return Plan(*check(request), options)


def prepare(request: RunRequest, source: PromptText, report: Report) -> Prepared:
    """Load the model and tokenize the prompt. Raises ValueError with one sentence."""
    check(request)
    report("load", 0, 1)
    from kvlens.engine.engine import Engine
    from kvlens.engine.models import load
    from kvlens.prompts import tokenize
    from kvlens.runs.fingerprint import fingerprint

    try:
        loaded = load(request.model, request.device, request.dtype, report)
    except Exception as failure:
        short = shortage(failure, "load")
        if short is None:
            raise
        raise short from failure
    steps = len(request.forced) if request.forced is not None else request.max_new
    form = (request.chat, request.system, request.question)
    prompt = tokenize(source, loaded.tokenizer, loaded.max_positions, steps, *form)
    if request.threads or loaded.info["parameters"] < SMALL:
        import torch

        torch.set_num_threads(request.threads or 1)
    prepared = Prepared(Engine(loaded), prompt, fingerprint(loaded))
    report("load", 1, 1)
    return prepared
