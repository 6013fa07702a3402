"""A trace of the open format as a stored run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from kvlens.meta import RunMeta
from kvlens.metaparts import Imported, ModelInfo, Sampled
from kvlens.records import SelfCheck
from kvlens.store.errors import TraceError
from kvlens.store.recover import delete_run
from kvlens.store.writer import TraceWriter
from kvlens.text.units import si_bytes
from kvlens.trace.cells import numbers
from kvlens.trace.check import Checked, check
from kvlens.trace.columns import VERSION
from kvlens.trace.head import Head
from kvlens.trace.records import Records

OWN_ENGINE = "kvlens"
"""the engine of traces that kvlens exported: the method keeps its name"""
_SAME = (
    "budget", "budget_bytes", "head_dim", "token_bytes", "full_kv_bytes", "dtype", "device", "link", "created",
    "prompt_text", "task", "answer", "answers", "needle", "question_tokens", "max_new", "seed", "temperature",
    "forced", "reference_output",
)  # fmt: skip
"""keys of trace.json that a run's meta has by the same name"""


def same_keys() -> tuple[str, ...]:
    """Return the keys of trace.json that a run's meta has by the same name."""
    return _SAME


CHECKED = SelfCheck("trace_format", True, None, "the trace passed every rule of the open format (kvlens check-trace)")


def import_checked(folder: Path, runs_dir: Path, uid: str | None = None) -> str:
    """Check a trace and store it as a run, in this process. Return its uid, which may be given. Raises BadTrace, and
    TraceError where the run cannot be written; whatever is raised, no run is left."""
    checked = check(folder)
    writer = TraceWriter(runs_dir, uid)
    new = not writer.folder.exists()
    try:
        writer.begin(RunMeta.model_validate(_meta(checked)))
        _write(writer, checked)
    except BaseException:
        if new:
            with contextlib.suppress(Exception):
                writer.finish("failed", None, [], {})
            with contextlib.suppress(TraceError):
                delete_run(runs_dir, writer.uid)
        raise
    return writer.uid


def _write(writer: TraceWriter, checked: Checked) -> None:
    """Store a trace in a run that has begun."""
    records, head = Records(checked), checked.head
    writer.prefill(records.prefill())
    texts: list[str] = []
    for record in records.steps():
        writer.step(record)
        if record.step >= (head.question_tokens or 0):
            texts.append(record.text)
    effects = records.effects()
    if effects is not None:
        writer.effects([effects])
    output = "".join(texts) if head.output_text is None else head.output_text
    places = {} if effects is None else {"effect_steps": effects.steps, "effect_order": effects.order}
    status = "completed" if head.complete else "cancelled"
    error = None if head.complete else f"{head.engine} ended before the run did; {head.steps} committed steps are here."
    writer.finish(status, error, [CHECKED], {"output_text": output, "stopped": head.stopped} | places)


def engine_method(head: Head) -> str:
    """Return the name of a trace's method among the runs: another engine's says whose it is."""
    method = head.method or "unknown"
    return method if head.engine.split()[0] == OWN_ENGINE else f"{method} in {head.engine}"


def _meta(checked: Checked) -> dict[str, Any]:
    head = checked.head
    texts = checked.tables["token"].slice(0, 0) if head.prompt_text is not None else checked.tables["token"]
    order = np.argsort(numbers(texts["pos"]), kind="stable")[: checked.prompt]
    prompt = head.prompt_text if head.prompt_text is not None else "".join(texts["text"].take(order).to_pylist())
    return {
        **{name: getattr(head, name) for name in _SAME},
        "budget": head.budget or (None if head.budget_bytes is None else si_bytes(head.budget_bytes)),
        "prompt_text": prompt,
        "layers": head.layers,
        "q_heads": head.q_heads,
        "kv_heads": head.kv_heads,
        "model": head.model,
        "model_info": ModelInfo(name=head.model, layers=head.layers, q_heads=head.q_heads, kv_heads=head.kv_heads),
        "method": engine_method(head),
        "config": head.parameters,
        "prompt_tokens": checked.prompt,
        "answer_rule": None if head.answer is None else "contains",
        "oracle": head.full_attention or _sampled(checked),
        "imported": Imported(engine=head.engine, version=VERSION, tables=tuple(sorted(checked.tables))),
    }


def _sampled(checked: Checked) -> Sampled | None:
    """The steps and layers that the table oracle has rows of."""
    table = checked.tables.get("oracle")
    if table is None or not table.num_rows:
        return None
    steps, layers = (np.unique(numbers(table[name]).astype(int)) for name in ("step", "layer"))
    every = int(np.gcd.reduce(steps)) or checked.head.steps or 1
    return Sampled(every=every, layers=() if len(layers) == checked.head.layers else tuple(layers.tolist()))
