"""Offload as it is: a pretrained model decodes a long prompt under every method that moves KV between the tiers, by the
engine of every run. Copies are the link's own, with the times that their events had; some of the runs are stored as
traces, which the app opens.

Each method decodes twice: not recorded, for its speed, and recorded, for what moved, what was waited for and what ran
beside the model. The prompt is read once for all.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from kvlens import methods
from kvlens.budget import BudgetInfeasible
from kvlens.lab.gpu.copiesseen import CopiesSeen
from kvlens.lab.gpu.failures import Lacking, sentence
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.gpu.tier import MOVES, moving
from kvlens.lab.results.offloadrow import OffloadRow
from kvlens.methods.naming import stand_in
from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import DEMO

if TYPE_CHECKING:
    from kvlens.engine.options import Result
    from kvlens.runs.preparing import Plan, Prepared
    from kvlens.runs.request import RunRequest

NAME = "offload"
NEEDED = ("transformers", "tokenizers", "pydantic", "duckdb", "pyarrow", "pandas")
"""packages without which a model is not run or a trace not written"""
BUDGET, DRY_BUDGET = "20%", "30%"
TOKENS, DRY_TOKENS = 8192, 512
"""of prompt and answer, as far as the model's context goes"""
NEW, DRY_NEW = 20, 3
TRACES = 6
LEVELS = ("spans", "heads")
"""how much of a run is stored: the first with which its trace is not too large. With the first the Memory page says of
every copy whether what came was read; the mean keys of all spans, which go with it, are most of such a trace"""
MOST_BYTES = 16 << 20
"""of a trace. On a CPU those of 8192 tokens had 7 to 24 MB with spans"""
SMALLER = "take a smaller model: --model demo"


def measure(bench: Bench) -> Iterator[OffloadRow]:
    """A method that is refused, or fails, is a row that says why. Raises Lacking with one sentence where the model or a
    package is not here, and where the time is over; rows of an earlier sitting with the same model are not measured
    again."""
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            reason = f"the package '{package}' is not installed here, and offload is run and stored with it"
            raise Lacking(reason, f"install {package}")
    held = [OffloadRow(**row) for row in bench.held(PART) if row["reason"] is None]
    finished = {row.method for row in held}
    yield from held
    ways = bench.keep("moving", moving)
    names = list(dict.fromkeys(way.name for way in ways))
    traced = set(spread(names, TRACES))
    remaining = [name for name in names if name not in finished]
    prepared = None
    for name in remaining:
        if bench.over:
            raise Lacking(f"the time was over before {', '.join(remaining[remaining.index(name) :])}", "run again")
        prepared = prepared or _prepared(bench, names)
        yield _row(bench, prepared, name, name in traced)


def spread(names: Sequence[str], count: int) -> list[str]:
    """The first of each family, then the second of each, as far as `count` goes."""
    families = dict.fromkeys(methods.get(name).family for name in names)
    lines = [[name for name in names if methods.get(name).family == family] for family in families]
    return [name for turn in zip_longest(*lines) for name in turn if name is not None][:count]


def _request(bench: Bench, name: str) -> RunRequest:
    from kvlens.runs.request import RunRequest

    return RunRequest(
        model=_model(bench),
        method=name,
        budget=DRY_BUDGET if bench.dry else BUDGET,
        max_new=DRY_NEW if bench.dry else NEW,
        ignore_eos=True,
        device=bench.device.at.type,
        dtype="float32" if bench.dry else "float16",
        coverage=False,
        overrides=_untrained(bench, name),
    )


def _model(bench: Bench) -> str:
    return DEMO if bench.dry else bench.offloaded


def _is_same_model(bench: Bench, row: dict[str, Any]) -> bool:
    """A row of another model is none of this call's."""
    return bool(row["model"] == _model(bench))


def _untrained(bench: Bench, name: str) -> dict[str, Any]:
    """What a method runs with where nothing was trained or calibrated for the model."""
    from kvlens.methods import calibration
    from kvlens.runs.request import default_preset

    method = methods.get(name)
    try:
        params = methods.make_parameters(method, default_preset(name, _model(bench)), {})
        calibration.require(method, params, _model(bench))
    except ValueError:
        return dict(method.untrained)
    return {}


def _prepared(bench: Bench, names: Sequence[str]) -> Prepared:
    """The model, and the prompt for all of them. Raises Lacking where the model is not here."""
    from kvlens import tasks
    from kvlens.models.catalogue import entry
    from kvlens.runs.preparing import prepare
    from kvlens.runs.readings import keeping
    from kvlens.tasks.encoding import encoding

    request = _request(bench, names[0])
    try:
        task = tasks.get(tasks.usual(request.model)[0])
        counted = encoding(request.model)
        target = DRY_TOKENS if bench.dry else TOKENS
        most = min(target, entry(request.model).context or target) - request.max_new
        source = tasks.prompt_of(tasks.ask(task, most, 0.5, 0, counted))
        prepared = prepare(request, source, _silent)
    except UnsupportedModel as problem:
        todo = "bring the model as docs/evidence/performance.md says, or name a GGUF file or a folder by --model"
        raise Lacking(str(problem).rstrip("."), todo) from None
    return replace(prepared, kept=keeping([methods.get(name) for name in names]))


def _row(bench: Bench, prepared: Prepared, name: str, traced: bool) -> OffloadRow:
    """One method, not recorded and recorded."""
    request, context = _request(bench, name), len(prepared.prompt.ids)
    row = OffloadRow(name, request.model, request.dtype, context, str(request.budget), request.max_new)
    try:
        from kvlens.runs.preparing import plan

        planned = plan(request, prepared)
        words = stand_in(name, dataclasses.asdict(planned.chosen.params))
        row = replace(row, note=planned.chosen.said or "", stand_in=words)
        plain = _run(prepared, planned, None)
        visited = CopiesSeen()
        if traced:
            recorded, trace, visited, wording = _store_run(bench, prepared, request, planned)
            row = replace(row, trace=trace, note=" ".join(filter(None, (row.note, wording))))
        else:
            recorded = _run(prepared, planned, visited)
        failed = tuple(check.name for check in recorded.checks if not check.passed)
        return replace(
            row,
            tokens_per_s=_speed(plain),
            recorded_tokens_per_s=_speed(recorded),
            same=plain.ids == recorded.ids,
            peak_bytes=recorded.peak_bytes,
            checks=len(recorded.checks),
            failed=failed,
            **visited.figures(),
        )
    except BudgetInfeasible as problem:
        return replace(row, reason=f"needs {problem.smallest / problem.full:.1%} of full KV on the device")
    except Exception as problem:
        if not bench.device.alive():
            raise
        return replace(row, reason=sentence(problem, SMALLER)[0])
    finally:
        bench.device.release()


def _run(prepared: Prepared, planned: Plan, sink: CopiesSeen | None) -> Result:
    from kvlens.runs.readings import reading

    read = reading(prepared, planned, _silent)
    return prepared.engine.run(
        prepared.prompt, planned.method, planned.params, planned.budget, planned.options, sink, read=read
    )


def _store_run(
    bench: Bench, prepared: Prepared, request: RunRequest, planned: Plan
) -> tuple[Result, str | None, CopiesSeen, str]:
    """The run, the uid of its trace, its figures, and what was stored where that is less than usual. A trace that is
    too large is not kept: the run is made again and less of it is stored, or nothing."""
    from kvlens.runs.preparing import Pairing
    from kvlens.runs.reference import reference_key
    from kvlens.runs.storing import store
    from kvlens.store.recover import delete_run

    pairing = Pairing(reference_key=reference_key(request, prepared))
    result, visited, lines = None, CopiesSeen(), list[str]()
    for level in LEVELS:
        visited, requested = CopiesSeen(), request.model_copy(update={"trace_level": level})
        stored = store(prepared, requested, planned, pairing, bench.runs, _silent, lambda: False, watcher=visited)
        result = stored.result
        assert result is not None, "nobody cancels it"
        size = (bench.runs / stored.uid / "trace.duckdb").stat().st_size
        if size <= MOST_BYTES:
            wording = f"Stored at trace level {level}: {', '.join(lines)}." if lines else ""
            return result, stored.uid, visited, wording
        lines.append(f"with {level} the trace has {size / 1e6:.1f} MB")
        delete_run(bench.runs, stored.uid)
    assert result is not None
    return result, None, visited, f"Not stored: {', '.join(lines)}."


def _speed(result: Result) -> float:
    """Tokens per second, by the median step: the first ones compile kernels."""
    return 1 / statistics.median(result.step_s)


def _silent(phase: str, count: int, total: int) -> None:
    """The bench reports parts, not phases."""


FILES = ("offload.py", "copiesseen.py", "tier.py", *MOVES)
PART = Part(NAME, measure, FILES, SMALLER, runs_methods=True, asked=_is_same_model)
