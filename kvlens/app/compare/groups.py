"""Many runs as points: how often a method at a budget gave the known answer, against what it held and attended."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from kvlens import tasks
from kvlens.app.compare.totals import attended
from kvlens.budget import NO_LIMIT
from kvlens.lens.knob import COUNTED, KEPT, attends, limit_of
from kvlens.lens.output import output_text
from kvlens.lens.severity import failed_checks
from kvlens.methods import FIT
from kvlens.methods.naming import stand_in
from kvlens.statistics import wilson
from kvlens.store.reader import TraceReader


@dataclass(frozen=True)
class Trial:
    """One run with a known answer."""

    uid: str
    model: str
    task: str
    method: str
    stand_in: str
    """parts of the method that were untrained or uncalibrated; '': none"""
    preset: str
    dtype: str
    """number format of KV, which shares of full KV are of"""
    budget: str
    """as `kvlens.budget` calls it; '' is no limit"""
    prompt: str
    """names the prompt"""
    exact: bool
    """the output is the answer (tasks.judged)"""
    peak_bytes: float
    """largest device-resident KV bytes inside a step"""
    full_kv_bytes: float
    h2d_bytes_per_step: float
    attended_tokens: float
    """per step and KV head, mean"""
    settings: tuple[tuple[str, str], ...] = ()
    """all else that was set, by name: parameters, place of the question, length, temperature, new tokens"""


def settings_of(reader: TraceReader) -> tuple[tuple[str, str], ...]:
    """Return what a run was asked for besides model, method, preset, number format and budget. The parameters that the
    preset `fit` computes follow from these and are left out."""
    meta, request = reader.meta, reader.meta.request or {}
    parameters = dict(request.get("overrides") or {}) if meta.preset == FIT else dict(meta.config)
    if attends(meta) is not None:
        parameters = {name: value for name, value in parameters.items() if name not in (KEPT, COUNTED)}
    tokens = (meta.prompt_tokens or 0) + meta.asked_steps
    fields = {
        "question": "after" if meta.asked_steps else "in",
        "length": f"about {2 ** round(math.log2(tokens)):,} tokens" if tokens else "",
        "temperature": f"{meta.temperature or 0:g}",
        "max_new": str(meta.asked_new if meta.asked_new is not None else meta.max_new),
    }
    return tuple(sorted({**{name: str(value) for name, value in parameters.items()}, **fields}.items()))


def trial(reader: TraceReader) -> Trial | None:
    """The run as a trial; None where no answer is known, where it did not run to its end, was fed another's tokens, or
    held or dropped ranges, or failed a self-check."""
    meta = reader.meta
    if not meta.answer or reader.status != "completed" or meta.forced or meta.interfered or not reader.n_steps:
        return None
    if failed_checks(reader):
        return None
    steps, task = reader.steps(), str(meta.task or "")
    exact = tasks.judged(task, str(meta.answer), output_text(reader), meta.answers)
    if exact is None:
        return None
    budget = limit_of(meta)
    return Trial(
        reader.uid,
        str(meta.model),
        task,
        str(meta.method),
        stand_in(str(meta.method), meta.config),
        str(meta.preset or ""),
        str(meta.dtype or ""),
        "" if budget == NO_LIMIT else budget,
        str(meta.prompt_sha256 or prompt_name(reader)),
        exact,
        float(steps["peak_bytes"].max()),
        float(meta.full_kv_bytes or np.nan),
        float(steps["h2d_bytes"].mean()),
        attended(reader),
        settings_of(reader),
    )


def prompt_name(reader: TraceReader) -> str:
    """Names a prompt by its tokens."""
    tokens = reader.tokens()
    return hashlib.sha256(tokens.loc[tokens["step"].isna(), "token_id"].to_numpy(np.int64).tobytes()).hexdigest()


def points(trials: Sequence[Trial]) -> pd.DataFrame:
    """One row per whole configuration (model, task, method, stand-in, preset, dtype, budget, settings as JSON): n
    (prompts), exact (share of them), low and high (95 % Wilson), and means of peak_bytes, full_kv_share,
    h2d_bytes_per_step, attended_tokens. Of several runs of one prompt in a group the newest counts: repeats are one
    prompt."""
    keys = ["model", "task", "method", "stand_in", "preset", "dtype", "budget", "settings"]
    columns = [
        *keys,
        "n",
        "exact",
        "low",
        "high",
        "peak_bytes",
        "full_kv_share",
        "h2d_bytes_per_step",
        "attended_tokens",
        "uids",
    ]
    if not trials:
        return pd.DataFrame(columns=columns)
    rows_of = [asdict(each) | {"settings": json.dumps(dict(each.settings))} for each in trials]
    frame = pd.DataFrame(rows_of).sort_values("uid").drop_duplicates([*keys, "prompt"], keep="last")
    frame["full_kv_share"] = frame["peak_bytes"] / frame["full_kv_bytes"]
    rows = []
    for place, part in frame.groupby(keys, sort=True):
        n, exact = len(part), float(part["exact"].mean())
        low, high = wilson(exact, n)
        means = {
            name: float(part[name].mean())
            for name in ("peak_bytes", "full_kv_share", "h2d_bytes_per_step", "attended_tokens")
        }
        rows.append(
            dict(zip(keys, place, strict=True))
            | {"n": n, "exact": exact, "low": low, "high": high, **means, "uids": " ".join(part["uid"])}
        )
    return pd.DataFrame(rows, columns=columns)


def default_pair(table: pd.DataFrame, prompt_of: Callable[[str], str | None]) -> tuple[str, str] | None:
    """(run, run it is compared with) to open with: the newest run that has a reference, against it; else the two newest
    of the same prompt, the newer first; else the two newest. None with fewer than two readable runs. `table`:
    list_runs, newest first."""
    uids, references = _readable(table), _references(table)
    known_names = set(uids)
    for uid in uids:
        if (reference := references.get(uid)) in known_names:
            return uid, str(reference)
    for place, uid in enumerate(uids):
        prompt = prompt_of(uid)
        for older in uids[place + 1 :] if prompt else ():
            if prompt_of(older) == prompt:
                return uid, older
    return (uids[0], uids[1]) if len(uids) > 1 else None


def partner(table: pd.DataFrame, uid: str, prompt_of: Callable[[str], str | None]) -> str | None:
    """What `uid` is compared with when nothing was asked for: its reference, a run whose reference it is, the newest
    other run of its prompt, the newest other run; None where there is no other."""
    candidates, references = [candidate for candidate in _readable(table) if candidate != uid], _references(table)
    if (reference := references.get(uid)) in candidates:
        return str(reference)
    own_prompt = prompt_of(uid)
    tests: tuple[Callable[[str], bool], ...] = (
        lambda candidate: references.get(candidate) == uid,
        lambda candidate: own_prompt is not None and prompt_of(candidate) == own_prompt,
    )
    for test in tests:
        for candidate in candidates:
            if test(candidate):
                return candidate
    return candidates[0] if candidates else None


def _readable(table: pd.DataFrame) -> list[str]:
    steps = pd.to_numeric(table["steps"], errors="coerce").fillna(0)
    return [str(uid) for uid in table.loc[(table["status"] != "unreadable") & (steps > 0), "uid"]]


def _references(table: pd.DataFrame) -> dict[str, str]:
    """uid -> uid of its reference, where it has one."""
    named = zip(table["uid"], table["reference"], strict=True) if "reference" in table else ()
    return {str(uid): reference for uid, reference in named if isinstance(reference, str)}
