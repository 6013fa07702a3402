"""What a run's trace says of the run: versions, model, method, sizes, request, machine."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from kvlens import __version__, tasks
from kvlens.meta import RunMeta
from kvlens.metaparts import Held, Machine, ModelInfo
from kvlens.methods.naming import stand_in
from kvlens.models.device import AUTO
from kvlens.runs.fingerprint import machine
from kvlens.runs.preparing import Pairing, Plan, Prepared
from kvlens.runs.request import RunRequest, default_budget
from kvlens.text.prompts import Prompt


def describe(request: RunRequest, planned: Plan, pairing: Pairing, prepared: Prepared) -> RunMeta:
    """The meta of a run that begins."""
    import torch
    import transformers

    from kvlens.engine.generation_rules import rules_of
    from kvlens.kernels.attend import planned_on
    from kvlens.link.cuda_link import link_name

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
        stand_in=stand_in(request.method, dataclasses.asdict(params)) or None,
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
    return {name for name in ("turns", "chat_args") if not getattr(request, name)}
