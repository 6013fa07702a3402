"""What a run needs before it can begin: a model in memory with a prompt, a checked plan, its part in a pair."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.holds import Drop, Hold
from kvlens.methods import calibration
from kvlens.methods.advice import advised
from kvlens.methods.faults import limited
from kvlens.methods.fitting import Chosen, Sizes, choose
from kvlens.methods.parameters import check_parameters
from kvlens.runs.request import BY_NAME, SMALL, ModelSource, Report, RunRequest, default_budget, default_preset
from kvlens.shortage import shortage
from kvlens.text.chat import ChatForm
from kvlens.text.prompts import Prompt, PromptText, refuse_longer

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference
    from kvlens.engine.engine import Engine, Options
    from kvlens.engine.prefill import ReadPrompt
    from kvlens.methods.base import Method
    from kvlens.runs.modelcheck import ModelCheck

READINGS = "KVLENS_READINGS"  # environment variable: the folder of readings; without it nothing is kept


@dataclass
class Kept:
    """A prompt that one process reads once for several runs, with all that any of them asks to see."""

    queries: int
    """the last queries that are kept at least"""
    received: bool
    """whether some method needs the attention that prompt tokens received"""
    read: ReadPrompt | None = None
    """None until the first run has come to it"""
    ahead_ns: int = 0
    """spent on the reading by a budget check: the first run that takes the reading counts it as its prefill"""
    in_turns: bool = False
    """the runs decode in turns, and share full KV's passes beside them"""


@dataclass(frozen=True)
class Prepared:
    """A loaded model and a tokenized prompt: what all runs of one request share."""

    engine: Engine
    prompt: Prompt
    fingerprint: str
    """of the model, see kvlens.engine.modelfiles"""
    kept: Kept | None = None
    """None: every run reads the prompt itself, or has it from the folder of readings"""
    model_check: ModelCheck | None = None
    """whether full KV equals the model's own generate; None: a model that a caller handed in"""
    load_s: float | None = None
    """what loading and checking the model took; None: a model that a caller handed in"""
    readings: Path | None = None
    """folder of readings; None: the one that the environment names, if it does"""

    @property
    def keeps_reading(self) -> bool:
        """Whether a reading of the prompt may be kept for other runs, in this process or in a folder."""
        return self.kept is not None or self.readings is not None or READINGS in os.environ


@dataclass(frozen=True)
class Plan:
    """A request, checked: the method with its parameters, the limit and the engine's options."""

    method: type[Method]
    chosen: Chosen
    budget: Budget
    options: Options

    @property
    def preset(self) -> str | None:
        return self.chosen.preset

    @property
    def params(self) -> Any:
        return self.chosen.params


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
    drops: Sequence[Drop] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    """what is asked for otherwise than of that run"""


def check(request: RunRequest) -> tuple[type[Method], Budget]:
    """The method and the budget of a request, before anything is loaded. Raises ValueError with one sentence for
    whatever can be told without the model's sizes: names, values, and figures of the model that are missing."""
    method = methods.get(request.method)
    preset = request.preset or default_preset(request.method, request.model)
    params = check_parameters(method, preset, request.overrides)
    if params is not None:
        _require(method, params, request)
    return method, Budget.parse(default_budget(request.method) if request.budget is None else request.budget)


def choose_parameters(request: RunRequest, sizes: Sizes) -> Chosen:
    """The parameters of a request, and how they came to be. Raises ValueError with one sentence."""
    method = methods.get(request.method)
    usual = default_preset(request.method, request.model)
    with limited(request.method, "floor_bytes"):
        choice = choose(method, request.preset, usual, request.overrides, sizes)
    _require(method, choice.params, request)
    return choice


def _require(method: type[Method], params: Any, request: RunRequest) -> None:
    """Raise ValueError with one sentence if figures of the model are missing that the parameters ask for."""
    if method.calibrations:
        calibration.require(method, params, request.model)


def advice(request: RunRequest, sizes: Sizes, needed: int) -> BudgetInfeasible:
    """The refusal of a request whose run takes `needed` bytes, with what would work."""
    usual = default_preset(request.method, request.model)
    return advised(methods.get(request.method), request.preset, usual, request.overrides, sizes, needed)


def sizes_of(request: RunRequest, prepared: Prepared) -> Sizes:
    """What decides whether the request's parameters fit."""
    _, budget = check(request)
    context = prepared.engine.context(prepared.prompt, budget, _options(request))
    return Sizes(context.shape, context.prompt_tokens, context.max_new, context.budget_bytes)


def plan(request: RunRequest, prepared: Prepared, forced: tuple[int, ...] | None = None) -> Plan:
    """A request with the tokens it is to be fed, if any. The device is divided for the request's own number of steps
    either way. Raises ValueError with one sentence, also for a prompt too long for the model under this method."""
    method, budget = check(request)
    sizes = sizes_of(request, prepared)
    choice = choose_parameters(request, sizes)
    reach = method.reach(choice.params, sizes)
    refuse_longer(sizes.prompt_tokens + 1, sizes.max_new, prepared.engine.loaded.max_positions, reach)
    return Plan(method, choice, budget, _options(request, forced))


def reference_key(request: RunRequest, prepared: Prepared) -> str:
    """What two runs of full KV must share to be the same: model, prompt, numbers, and how tokens are chosen. 64 hex
    digits."""
    import torch
    import transformers

    from kvlens.engine.options import rules_of

    fields = {
        "model": prepared.fingerprint,
        "prompt": list(prepared.prompt.ids),
        "dtype": request.dtype,
        "device": prepared.engine.loaded.model.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prefill_chunk": request.prefill_chunk,
        "seed": request.seed,
        "max_new": request.max_new,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop": list(request.stop),
        "ignore_eos": request.ignore_eos,
    }
    rules = rules_of(prepared.engine.loaded.model)
    if rules:
        fields["generation_rules"] = rules
    if prepared.prompt.asked:
        fields["asked"] = list(prepared.prompt.asked)
    if prepared.engine.seat is not None:  # rows of a batch round otherwise
        fields["batched"] = True
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _options(request: RunRequest, forced: tuple[int, ...] | None = None) -> Options:
    from kvlens.engine.engine import Options

    return Options(
        max_new=request.max_new,
        seed=request.seed,
        temperature=request.temperature,
        top_p=request.top_p,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        prefill_chunk=request.prefill_chunk,
        top_k=request.top_k,
        coverage=request.coverage,
        phases=request.phases,
        oracle=request.oracle,
        forced=request.forced if forced is None else forced,
        planned=None if forced is None else request.max_new,
    )


def prepare(
    request: RunRequest, source: PromptText, report: Report, form: ChatForm | None = None, models: ModelSource = BY_NAME
) -> Prepared:
    """Load the model and tokenize the prompt; `plan` checks whether they fit together. form: of the stored run that is
    repeated. Raises ValueError with one sentence."""
    check(request)
    report("load", 0, 1)
    start_time = time.perf_counter()
    from kvlens.engine.modelfiles import ahead
    from kvlens.runs.modelcheck import first_check
    from kvlens.text.prompts import tokenize

    hashed = ahead(request.model) if models.named else None
    try:
        loaded = models.load(request, report)
    except Exception as failure:
        short = shortage(failure, "load")
        if short is None:
            raise
        raise short from failure
    form_fields = (request.chat, request.system, request.question)
    conversation = (request.turns, request.chat_args, request.carried)
    prompt = tokenize(source, loaded.tokenizer, None, request.max_new, *form_fields, form, *conversation)
    if request.threads or loaded.info["parameters"] < SMALL:
        import torch

        torch.set_num_threads(request.threads or 1)
    from kvlens.engine.engine import Engine

    if hashed is not None:
        hashed.join()
    prepared = Prepared(Engine(loaded), prompt, loaded.fingerprint())
    if models.named:
        model_check = first_check(prepared.engine, prepared.fingerprint)
        prepared = replace(prepared, model_check=model_check, load_s=time.perf_counter() - start_time)
    report("load", 1, 1)
    return prepared
