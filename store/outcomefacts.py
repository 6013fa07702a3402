"""The recorded facts from which a list of runs tells what came of a run: its first lost step, whether it was compared,
whether a self-check failed, its answers. Written into run.json when the run ends, so that no list opens its trace."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kvlens.files import read_plain
from kvlens.meta import RunMeta
from kvlens.store.schema import SCHEMA_VERSION
from kvlens.store.versions import meta_now
from kvlens.text.plaintext import visible

VERSION = 3
"""of the facts' form: facts of another version are read from the trace again"""
EXCERPT = 200
"""characters that are kept of a prompt's beginning and of its end"""
_SIZES = ("keep", "tokens")
"""parameters that limit what a method attends which keeps every token"""
_WORD = 60
"""characters that are kept of a parameter's value"""
Rows = Callable[[str], Sequence[tuple[Any, ...]]]
"""runs a statement and returns its rows"""


class LossFacts(BaseModel):
    """The first step whose most probable token is not full KV's. None: not recorded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    ref_token: int
    top_token: int
    kl: float | None = None
    """KL(full KV || method), nats"""
    ref_top_logprob: float | None = None
    """log-probability of full KV's token under the method"""
    token: int | None = None
    """token of the run at the step"""
    token_logprob: float | None = None


class OutcomeFacts(BaseModel):
    """What is recorded of how a run ended."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = VERSION
    failed: bool
    """a self-check failed"""
    compared: bool
    """at least one step was compared with full KV"""
    loss: LossFacts | None = None
    method: str | None = None
    sizes: dict[str, Any] = {}
    preset: str | None = None
    parameters: dict[str, str] = {}
    """all parameters of the method as text; those of a part are named 'part.name'"""
    requested: tuple[str, ...] = ()
    """of these, the ones that were asked for; none of a repeat that took over what another run came to"""
    dtype: str | None = None
    question: str | None = None
    """in or after; None: a trace from before there was the choice"""
    seed: int | None = None
    budget: str | None = None
    budget_bytes: int | None = None
    task: str | None = None
    answer: str | None = None
    answers: tuple[str, ...] = ()
    forced: bool = False
    output_text: str | None = None
    stopped: str | None = None
    """why the output ended: eos, stop, length or forced"""
    reference_output: str | None = None
    temperature: float | None = None
    stop_ids: tuple[int, ...] = ()
    prompt: str | None = None
    """SHA-256 of the prompt's text; None: the text was not kept"""
    begins: str = ""
    ends: str = ""
    """its first and last characters, on one line"""


def read_facts(rows: Rows, table: Callable[[str], str], meta: RunMeta, prompt: str) -> OutcomeFacts:
    """Read the facts of a run's open trace. `table`: the name by which a statement reaches a table. `prompt`: the
    prompt's text, "" where it was not kept."""
    failed = rows(f"SELECT count(*) FROM {table('self_check')} WHERE NOT passed")[0][0]
    compared = rows(f"SELECT count(*) FROM {table('loss')}")[0][0]
    lost_steps = rows(
        f"SELECT l.step, l.ref_token, l.top_token, l.kl, l.logprob, t.token_id, t.logprob FROM {table('loss')} l "
        f"LEFT JOIN {table('token')} t ON t.step = l.step WHERE NOT l.agrees ORDER BY l.step LIMIT 1"
    )
    digest = hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest() if prompt else None
    name = meta.prompt_sha256 or digest
    return OutcomeFacts(
        failed=failed > 0,
        compared=compared > 0,
        loss=_loss(lost_steps[0]) if lost_steps else None,
        method=meta.method,
        sizes={name: value for name, value in meta.config.items() if name in _SIZES and _is_number(value)},
        preset=meta.preset,
        parameters=parameter_texts(meta.config),
        requested=_requested(meta),
        dtype=meta.dtype,
        question=meta.question,
        seed=meta.seed,
        budget=meta.budget,
        budget_bytes=meta.budget_bytes,
        task=meta.task,
        answer=meta.answer,
        answers=meta.answers,
        forced=bool(meta.forced),
        output_text=meta.output_text,
        stopped=meta.stopped,
        reference_output=meta.reference_output,
        temperature=_finite(meta.temperature),
        stop_ids=meta.stop_ids,
        prompt=name and name[:64],
        begins=_line(prompt[:EXCERPT]),
        ends=_line(prompt[-EXCERPT:]),
    )


def _requested(meta: RunMeta) -> tuple[str, ...]:
    """Return the parameters that were asked for. A repeat is given all that its run came to; none is asked for."""
    if meta.parent and not meta.changed:
        return ()
    return tuple(parameter_texts((meta.request or {}).get("overrides")))


def facts_at_end(rows: Rows, folder: Path, version: int | None) -> OutcomeFacts:
    """Read the facts of the run in `folder` through the connection that wrote its trace. version: the schema in which
    its meta was written; None: unknown."""
    values = {key: json.loads(value) for key, value in rows("SELECT key, value FROM meta")}
    meta = values if version == SCHEMA_VERSION else meta_now(values)
    return read_facts(rows, str, RunMeta.model_validate(meta), read_prompt(folder))


def read_prompt(folder: Path) -> str:
    """Return the prompt's text; "" where it was not kept."""
    try:
        return read_plain(folder / "prompt.txt").decode("utf-8")
    except (OSError, ValueError):
        return ""


def stored_facts(info: Mapping[str, Any], trace: tuple[int, int] | None) -> OutcomeFacts | None:
    """Return the facts in run.json; None where they are absent, of another version, or of another trace than the one
    whose (time of change in ns, bytes) is given."""
    stored = info.get("facts")
    if trace is None or not isinstance(stored, dict) or stored.get("trace") != list(trace):
        return None
    return parsed_facts(stored.get("outcome"))


def parsed_facts(stored: Any) -> OutcomeFacts | None:
    """Return facts from their JSON form; None where they are damaged or of another version."""
    if not isinstance(stored, dict) or stored.get("version") != VERSION:
        return None
    try:
        return OutcomeFacts.model_validate(stored)
    except ValidationError:
        return None


def facts_entry(facts: OutcomeFacts | None, trace: Path) -> dict[str, Any] | None:
    """Return the entry of run.json for a trace that has been closed; None where there are no facts or no trace."""
    stamp = trace_stamp(trace)
    return None if facts is None or stamp is None else {"trace": list(stamp), "outcome": facts.model_dump(mode="json")}


def parameter_texts(config: Any, prefix: str = "") -> dict[str, str]:
    """Return parameters as text, those of a part as 'part.name'; {} for what is no mapping."""
    texts: dict[str, str] = {}
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if isinstance(value, Mapping):
            texts |= parameter_texts(value, f"{prefix}{name}.")
        else:
            texts[f"{prefix}{name}"] = _line(str(list(value) if isinstance(value, tuple) else value))[:_WORD]
    return texts


def trace_stamp(trace: Path | str) -> tuple[int, int] | None:
    """Return (time of change in ns, bytes) of a trace; None where there is no file."""
    try:
        status = os.stat(trace)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size


def _loss(row: tuple[Any, ...]) -> LossFacts:
    step, reference, top, kl, logprob, token, token_logprob = row
    return LossFacts(
        step=step,
        ref_token=reference,
        top_token=top,
        kl=_finite(kl),
        ref_top_logprob=_finite(logprob),
        token=token,
        token_logprob=_finite(token_logprob),
    )


def _finite(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else float(number)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _line(text: str) -> str:
    return " ".join(visible(text).split())
