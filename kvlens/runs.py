"""One run from request to trace: what a person asked for, checked before any work, carried out, stored."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvlens import __version__, methods
from kvlens.budget import Budget
from kvlens.machine import machine
from kvlens.prompts import PromptText

DEFAULT_SHARE = "0.2"
"""budget of methods that do not keep all KV on the device, when none is given"""


SMALL = 100_000_000
"""parameters below which waking a second thread costs more than it saves"""


class RunRequest(BaseModel):
    """What to run. Bad values are refused here, before a model is loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = "demo"
    method: str = "sekv"
    preset: str | None = None
    budget: str | None = None
    max_new: int = Field(64, ge=1, le=100_000)
    seed: int = 0
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    overrides: dict[str, Any] = {}
    device: str = "cpu"
    dtype: str = "float32"
    prefill_chunk: int = Field(512, ge=0)
    top_k: int = Field(16, ge=1, le=256)
    trace_level: str = "spans"
    coverage: bool = True
    forced: tuple[int, ...] | None = None
    threads: int = Field(0, ge=0)
    """torch threads of the engine; 0: one for a model under SMALL parameters, torch's choice otherwise"""


def default_preset(method: str, model: str) -> str | None:
    """The preset named 'demo' for the demo model, the paper's own otherwise, where the method has them."""
    presets = methods.get(method).presets
    wanted = "demo" if model == "demo" else "paper"
    return wanted if wanted in presets else None


def default_budget(method: str) -> str:
    """No limit for methods that keep all KV on the device, DEFAULT_SHARE of full KV for the others."""
    return "1.0" if methods.get(method).keeps_all else DEFAULT_SHARE


def parse_set(items: list[str]) -> dict[str, str]:
    """['alpha=2', ...] -> {'alpha': '2'}. Raises ValueError with one sentence."""
    pairs = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign or not name.strip():
            raise ValueError(f"--set takes name=value, not '{item}'.")
        pairs[name.strip()] = value
    return pairs


Report = Callable[[str, int, int], None]


def carry_out(
    request: RunRequest, source: PromptText, runs_dir: Path, report: Report, cancelled: Callable[[], bool]
) -> tuple[str, str, str]:
    """Run and store; returns (uid, status, output text). report(phase, done, total): load, prefill, place, decode, store.

    Raises ValueError (with one sentence) for whatever is wrong with the request, the prompt, the model or the budget; nothing is
    stored then. Raises the store's TraceError when the trace cannot be written.
    """
    method = methods.get(request.method)
    preset = request.preset or default_preset(request.method, request.model)
    params = methods.make_parameters(method, preset, dict(request.overrides))
    budget = Budget.parse(request.budget or default_budget(request.method))
    report("load", 0, 1)
    from kvlens.models import load
    from kvlens.prompts import tokenize

    loaded = load(request.model, request.device, request.dtype)
    steps = len(request.forced) if request.forced is not None else request.max_new
    prompt = tokenize(source, loaded.tokenizer, loaded.max_positions, steps)
    if request.threads or loaded.info["parameters"] < SMALL:
        import torch

        torch.set_num_threads(request.threads or 1)
    report("load", 1, 1)

    from kvlens.engine import Cancelled, Engine, Options
    from kvlens.store.writer import TraceWriter

    engine = Engine(loaded)
    options = Options(
        max_new=request.max_new, seed=request.seed, temperature=request.temperature, top_p=request.top_p, stop=request.stop,
        ignore_eos=request.ignore_eos, prefill_chunk=request.prefill_chunk, forced=request.forced, top_k=request.top_k,
        coverage=request.coverage,
    )  # fmt: skip
    context = engine.context(prompt, budget, options)
    writer = TraceWriter(runs_dir, trace_level=request.trace_level)
    sink = _LateSink(writer, _meta(request, preset, params, loaded.info, prompt, context))
    status, error, checks = "completed", None, []
    extra: dict[str, Any] = {}
    try:
        result = engine.run(prompt, method, params, budget, options, sink, report, cancelled)
        checks = result.checks
        extra = {
            "output_text": result.text, "stopped": result.stopped, "prefill_s": round(result.prefill_s, 4),
            "decode_s": round(result.decode_s, 4), "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }  # fmt: skip
    except Cancelled as stopped:
        status, error, checks = "cancelled", "Cancelled by the user.", stopped.checks
    except Exception as failure:
        if sink.begun:
            writer.finish("failed", f"{type(failure).__name__}: {failure}", [], {"output_text": sink.text()})
        raise
    if not sink.begun:
        raise ValueError("cancelled before anything was decoded.")
    report("store", 0, 1)
    writer.finish(status, error, checks, extra or {"output_text": sink.text()})
    report("store", 1, 1)
    return writer.uid, status, str(extra.get("output_text", sink.text()))


class _LateSink:
    """Begins the trace when prefill has succeeded, so that a refused run leaves nothing behind."""

    def __init__(self, writer: Any, meta: dict[str, Any]) -> None:
        self._writer, self._meta, self.begun = writer, meta, False
        self._pieces: list[str] = []

    def begin(self, meta: dict[str, Any]) -> None:
        raise AssertionError("the run's meta is given once, when the sink is made")

    def prefill(self, record: Any) -> None:
        self._writer.begin(self._meta)
        self.begun = True
        self._writer.prefill(record)

    def step(self, record: Any) -> None:
        self._pieces.append(record.text)
        self._writer.step(record)

    def finish(self, *args: Any) -> None:
        self._writer.finish(*args)

    def text(self) -> str:
        """What was generated so far, token by token."""
        return "".join(self._pieces)


def _meta(request: RunRequest, preset: str | None, params: Any, info: dict[str, Any], prompt: Any, context: Any) -> dict[str, Any]:
    import torch
    import transformers

    from kvlens.kernels.attend import KERNELS
    from kvlens.memory.link import link_name

    shape, source = context.shape, prompt.source
    ours = {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.metadata.get("ours")}
    return {
        "kvlens": __version__, "torch": torch.__version__, "transformers": transformers.__version__, "model": request.model,
        "model_info": info, "device": request.device, "dtype": request.dtype, "method": request.method, "preset": preset,
        "config": dataclasses.asdict(params), "own_decisions": ours, "budget": request.budget or default_budget(request.method),
        "budget_bytes": context.budget_bytes, "prompt_tokens": len(prompt.ids), "max_new": context.max_new, "seed": request.seed,
        "temperature": request.temperature, "top_p": request.top_p, "forced": request.forced is not None, "layers": shape.layers,
        "q_heads": shape.q_heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "token_bytes": shape.token_bytes,
        "full_kv_bytes": context.full_kv_bytes, "link": link_name(context.device), "kernels": KERNELS, "task": source.task, "answer": source.answer,
        "needle": [list(pair) for pair in source.needle], "prompt_text": source.text, "coverage": request.coverage,
        "machine": machine(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
