"""How long a run will likely take and how large its trace will be: by the runs of the same model that are stored here.
Estimates, labelled so wherever they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvlens.runs.preflight import TOKEN_BYTES
from kvlens.store.errors import TraceError
from kvlens.store.reader import list_runs
from kvlens.store.runinfo import read_info

MOST = 5
"""runs that an estimate is made by, the newest"""


@dataclass(frozen=True)
class Likely:
    """What runs of the model here say of another one."""

    prefill_s: float | None
    """of the prompt, with the surprisals of its tokens, whenever they are computed; None: all of the runs took a prompt
    that was read before"""
    decode_s: float
    """for all its steps"""
    trace_bytes: int
    runs: int
    own: bool
    """they are the method's own; else any method's"""


def likely(runs_dir: Path, model: str, method: str, prompt_tokens: int, steps: int, step_bytes: int) -> Likely | None:
    """For `prompt_tokens` and at most `steps` steps, each of which adds `step_bytes` to the trace. None where no whole
    run of the model is stored here."""
    table = list_runs(runs_dir)
    whole = (table["status"] == "completed") & (table["model"] == model) & (table["steps"] > 0)
    whole &= ~table["hold"].map(bool) & (table["prompt_tokens"] > 0)
    own_value = table[whole & (table["method"] == method)]
    used = own_value if len(own_value) else table[whole]
    known_values = [results for uid in used["uid"].head(MOST) if (results := _times(runs_dir, uid)) is not None]
    if not known_values:
        return None
    prefill = [
        (item["prefill_s"] + item["surprisal_s"]) / item["prompt_tokens"]
        for item in known_values
        if item["prefill_s"] is not None
    ]
    sizes = [
        item["disk_bytes"]
        + TOKEN_BYTES * (prompt_tokens - item["prompt_tokens"])
        + step_bytes * (steps - item["steps"])
        for item in known_values
    ]
    return Likely(
        median(prefill) * prompt_tokens if prefill else None,
        median(item["decode_s"] / item["steps"] for item in known_values) * steps,
        max(0, round(median(sizes))),
        len(known_values),
        bool(len(own_value)),
    )


def _times(runs_dir: Path, uid: str) -> dict[str, Any] | None:
    """What run.json says of a run's times and size; None where it says too little."""
    try:
        info = read_info(runs_dir / uid)
    except TraceError:
        return None
    extra = info.get("extra")
    sentence = {name: info.get(name) for name in ("prompt_tokens", "steps", "disk_bytes")}
    times = ("prefill_s", "surprisal_s", "decode_s")
    sentence |= {name: extra.get(name) for name in times} if isinstance(extra, dict) else {}
    numbers = {name: value for name, value in sentence.items() if isinstance(value, int | float) and value > 0}
    if not {"prompt_tokens", "steps", "disk_bytes", "decode_s"} <= numbers.keys():
        return None
    return {"prefill_s": None, "surprisal_s": 0.0} | numbers
