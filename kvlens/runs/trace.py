"""What a run writes into its trace: the meta when it begins, the records as they come, and late the surprisals that the
method did not need. The trace begins with the first record, so that a run which is refused before leaves no file."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, Protocol

from kvlens import __version__, tasks
from kvlens.meta import RunMeta
from kvlens.metaparts import Held, Machine, ModelInfo
from kvlens.methods.fitting import stand_ins
from kvlens.models.device import AUTO, machine
from kvlens.records import PrefillRecord, StepRecord
from kvlens.runs.effects import Lost
from kvlens.runs.preparing import Pairing, Plan, Prepared
from kvlens.runs.request import Report, RunRequest, default_budget
from kvlens.shortage import shortage
from kvlens.text.prompts import Prompt

if TYPE_CHECKING:
    import numpy as np

    from kvlens.engine.prefill import Surprisals
    from kvlens.recording.facts import Seen
    from kvlens.store.writer import TraceWriter


def describe(request: RunRequest, planned: Plan, pairing: Pairing, prepared: Prepared) -> RunMeta:
    """The meta of a run that begins."""
    import torch
    import transformers

    from kvlens.engine.options import rules_of
    from kvlens.kernels.attend import planned_on
    from kvlens.link.transfers import link_name

    loaded, prompt, params = prepared.engine.loaded, prepared.prompt, planned.params
    against = pairing.reference
    context = prepared.engine.context(prompt, planned.budget, planned.options)
    oracle = prepared.engine.sampling(prompt, planned.options)
    shape, source = context.shape, prompt.source
    ours = {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.metadata.get("ours")}
    return RunMeta(
        kvlens=__version__,
        torch=torch.__version__,
        transformers=transformers.__version__,
        model=request.model,
        model_info=ModelInfo(**loaded.info),
        model_fingerprint=prepared.fingerprint,
        model_check=None if prepared.model_check is None else dataclasses.asdict(prepared.model_check),
        device=loaded.model.device.type if request.device == AUTO else request.device,
        dtype=request.dtype,
        method=request.method,
        preset=planned.preset,
        fit=planned.chosen.said,
        config=dataclasses.asdict(params),
        stand_in=stand_ins(planned.method, dataclasses.asdict(params)) or None,
        own_decisions=ours,
        budget=request.budget or default_budget(request.method),
        budget_bytes=context.budget_bytes,
        prompt_tokens=len(prompt.ids),
        max_new=context.max_new,
        seed=request.seed,
        temperature=request.temperature,
        top_p=request.top_p,
        forced=planned.options.forced is not None,
        layers=shape.layers,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        token_bytes=shape.token_bytes,
        full_kv_bytes=context.full_kv_bytes,
        **({"windows": shape.windows} if shape.windows else {}),
        link=link_name(context.device),
        kernels=planned_on(context.device, shape.head_dim),
        task=source.task,
        answer=source.answer,
        **({"answers": source.answers} if source.answers else {}),
        answer_rule=None if source.answer is None else tasks.rule_of(source.task),
        answer_prefix=source.answer_prefix or None,
        question=request.question,
        question_start=source.question,
        question_tokens=len(prompt.asked),
        chat=None if prompt.form is None else prompt.form.meta(),
        stop_ids=tuple(sorted(loaded.eos)),
        generation_rules=rules_of(loaded.model),
        needle=source.needle,
        **_segments(prompt),
        prompt_text=source.text,
        coverage=request.coverage,
        oracle=None if oracle is None else oracle.meta(),
        request=request.model_dump(mode="json", exclude={"forced", "hold", "drop"} | _left_out(request)),
        reference=pairing.reference_uid,
        reference_output=None if against is None else loaded.decode(against.ids[len(prompt.asked) :]),
        reference_key=pairing.reference_key,
        parent=pairing.parent,
        hold=tuple(Held(**dataclasses.asdict(hold)) for hold in pairing.holds),
        **({"drop": tuple(Held(**dataclasses.asdict(drop)) for drop in pairing.drops)} if pairing.drops else {}),
        **({"changed": dict(pairing.changed)} if pairing.changed else {}),
        whatif=None,
        machine=Machine(**machine()),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _segments(prompt: Prompt) -> dict[str, Any]:
    """Named parts of the prompt, where there are any."""
    parts = {"segments": prompt.segments, "segment_ranges": prompt.source.segments}
    return {key: tuple((part.name, part.start, part.end) for part in named) for key, named in parts.items() if named}


def _left_out(request: RunRequest) -> set[str]:
    """Fields that a trace has only where they were used."""
    return {name for name in ("turns", "chat_args", "carried") if not getattr(request, name)}


class Watcher(Protocol):
    """Sees what is stored of a run while it goes on; must change nothing."""

    def begun(self, uid: str) -> None:
        """The prompt is placed, and the run is there under this id."""

    def note_step(self, visited: Seen) -> None:
        """A step has ended: once each, in order, on the run's thread."""

    def decoded(self, text: str) -> None:
        """The last step was made and this is the output. The last steps are still being measured; the run's surprisals
        and effects are still to come."""

    def sketched(self, step: int, attended: np.ndarray, coverage: np.ndarray | None) -> None:
        """See kvlens.recording.recorder.Follower."""

    def step(self, record: StepRecord) -> None:
        """A step was measured too, some steps later: once each, in order, on the recorder's thread."""


class LateSink:
    """Begins the trace when prefill has succeeded, so that a refused run leaves nothing behind."""

    def __init__(self, writer: TraceWriter, meta: RunMeta, watcher: Watcher | None, lost: Lost | None) -> None:
        self._writer, self._meta, self._watcher, self._lost, self.begun = writer, meta, watcher, lost, False
        self._asked = meta.asked_steps
        self._pieces: list[str] = []
        self.surprisals_wait = False
        """the prompt was placed, and its tokens' surprisals were not known"""

    def begin_anyhow(self) -> None:
        """Begin the trace of a run that got no further."""
        if not self.begun:
            self._writer.begin(self._meta)
            self.begun = True
            if self._watcher is not None:
                self._watcher.begun(self._writer.uid)

    def prefill(self, record: PrefillRecord) -> None:
        self.begin_anyhow()
        self._writer.prefill(record)
        self.surprisals_wait = record.tokens[-1].surprisal is None
        if self._lost is not None:
            self._lost.prefill(record)

    def step(self, record: StepRecord) -> None:
        if record.step >= self._asked:
            self._pieces.append(record.text)
        self._writer.step(record)
        if self._lost is not None:
            self._lost.step(record)
        if self._watcher is not None:
            self._watcher.step(record)

    def text(self) -> str:
        """What was generated so far, token by token."""
        return "".join(self._pieces)


SURPRISAL_PHASE = "surprisal"
"""how far this is, as it is reported"""


def add_surprisals(surprisals: Surprisals, writer: TraceWriter, follow: Report, tell: Report) -> str | None:
    """Have the trace know them -> why it does not; None: it does. What `follow` raises to stop, and whatever goes
    wrong, costs them and nothing else: the run has ended. `tell`, which stops nothing, hears of the end."""
    from kvlens.engine.engine import Cancelled

    rows = 0

    def follow_rows(finished: int, total: int) -> None:
        nonlocal rows
        rows = total
        follow(SURPRISAL_PHASE, finished, total)

    try:
        results = surprisals.whole(follow_rows)
    except Cancelled:
        return "it was cancelled"
    except Exception as failure:
        short = shortage(failure)
        return str(short) if short is not None else f"it failed ({type(failure).__name__}: {failure})"
    writer.surprisals(results.numpy(force=True))
    if rows:
        tell(SURPRISAL_PHASE, rows, rows)
    return None
