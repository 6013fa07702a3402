"""An arm of a study beside its method's paper: why a score is not the paper's. Parameters are those of the preset
`paper`; the rest is what the paper's text or its benchmark says (kvlens.studies.protocols)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlens import methods, tasks
from kvlens.budget import in_words
from kvlens.methods.base import Method
from kvlens.methods.parameters import FIT
from kvlens.models.find import short_model
from kvlens.runs.request import default_preset
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from kvlens.studies.errors import BadStudy
from kvlens.studies.plan import Arm
from kvlens.studies.protocols import BENCHMARKS, NOT_STATED, SETTINGS, protocol_of
from kvlens.studies.table import Results

UNKNOWN = "not recorded here"


@dataclass(frozen=True)
class Row:
    """One setting."""

    setting: str
    study: str
    paper: str
    state: str
    """same | differs | check: a reader compares them, or the paper was not read | ours: the paper has no such value |
    silent: the paper does not state it"""


def beside_paper(results: Results, label: str, runs_dir: Path | None = None) -> list[Row]:
    """Return the settings of an arm beside its paper's, those that differ first.

    Args:
        label: the arm's label or key.
        runs_dir: folder of the runs, one of which has the parameters that the preset `fit` chose; None: not read.

    Raises BadStudy `unknown_arm`; `no_paper` for full KV.
    """
    arm = results.arm(label)
    method = methods.get(arm.method)
    if arm.method == methods.REFERENCE:
        raise BadStudy("no_paper", "full KV is what methods are compared with: it has no paper's settings.")
    recorded = {} if runs_dir is None else _recorded(runs_dir, results, arm)
    rows = [*_parameters(method, arm, results, recorded), *_protocol(method, arm, results)]
    order = ("differs", "check", "ours", "silent", "same")
    return sorted(rows, key=lambda row: order.index(row.state))


def _recorded(runs_dir: Path, results: Results, arm: Arm) -> dict[str, Any]:
    """The parameters of the arm's first stored run; {} where there is none."""
    for trial in results.trials:
        if trial.arm == arm.key() and trial.uid is not None:
            with contextlib.suppress(TraceError), TraceReader.open(runs_dir, trial.uid) as reader:
                return dict(reader.meta.config)
    return {}


def _parameters(method: type[Method], arm: Arm, results: Results, recorded: Mapping[str, Any]) -> Iterator[Row]:
    """Every parameter, as it was run where a run is stored, else as it was asked for."""
    paper = dataclasses.asdict(methods.make_parameters(method, "paper" if "paper" in method.presets else None, {}))
    preset = arm.preset or default_preset(arm.method, results.info.plan.shared.model)
    overrides = methods.converted(method, arm.overrides)
    used = dict(recorded)
    if not used and preset != FIT:
        used = dataclasses.asdict(methods.make_parameters(method, preset, overrides))
    for field in dataclasses.fields(method.Parameters):
        value = used.get(field.name, overrides.get(field.name, f"chosen by the preset {FIT}"))
        if field.metadata.get("ours"):
            state = "ours"
        elif field.name not in used and field.name not in overrides:
            state = "check"
        else:
            state = "same" if value == paper[field.name] else "differs"
        yield Row(field.name, str(value), str(paper[field.name]) if state != "ours" else "the paper is silent", state)


def _protocol(method: type[Method], arm: Arm, results: Results) -> Iterator[Row]:
    shared = results.info.plan.shared
    used = _judge(results)
    protocol = protocol_of(method.name, method.benchmark)
    budget = in_words(arm.budget) if arm.budget else "no limit"
    study = {
        "model": short_model(shared.model),
        "prompt form": f"chat form {shared.chat}, " + ("the task's template" if used else "the prompt as it is"),
        "truncation": "none: a prompt is whole, or its file cuts it",
        "scoring": ", ".join(used) or "the output contains the answer",
        "decoding": f"temperature {shared.temperature:g}" if shared.temperature else "greedy",
        "number format of KV": shared.dtype,
        "budget": f"{budget} of bytes on the device, tokens that are generated included",
    }
    kind = f"{method.benchmark.lower()}:"
    groups = [prompt.group for prompt in results.prompts]
    same_benchmark = bool(method.benchmark and used and groups) and all(group.startswith(kind) for group in groups)
    agrees = {"prompt form": same_benchmark and shared.chat == "auto", "scoring": same_benchmark, "truncation": False}
    for name in SETTINGS:
        paper = protocol.get(name, UNKNOWN)
        compared = name in agrees and method.benchmark in BENCHMARKS and name in BENCHMARKS[method.benchmark]
        yield Row(name, study[name], paper, _same(agrees[name]) if compared else _unjudged(paper))
    queries = method.needs.queries > 0
    reads = "in the prompt: its score reads the last queries" if queries else "its score does not read it"
    same = arm.question == "in" or not queries
    yield Row("question", "in the prompt" if arm.question == "in" else "after the context", reads, _same(same))


def _unjudged(paper: str) -> str:
    """The state of a setting that is text on both sides: a reader compares them."""
    return "silent" if paper == NOT_STATED else "check"


def _judge(results: Results) -> Sequence[str]:
    """The metrics of the study's tasks."""
    names = dict.fromkeys(prompt.source.task for prompt in results.prompts if prompt.source.task)
    metrics = []
    for name in names:
        try:
            metrics.append(tasks.get(str(name)).metric)
        except ValueError:
            continue
    return list(dict.fromkeys(metrics))


def _same(is_same: bool) -> str:
    return "same" if is_same else "differs"
