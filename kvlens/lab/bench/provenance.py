"""On what a measurement was made, and what makes two trials comparable."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from kvlens import __version__, methods, tasks
from kvlens.lab.bench.sources import code
from kvlens.lab.bench.trials import settings
from kvlens.models.device import machine


@cache
def weights(model: str) -> str:
    """SHA-256 of a local model's safetensors in order; of nothing for a hub id that is not a folder."""
    from kvlens.models.find import resolve

    digest = hashlib.sha256()
    for path in sorted(Path(resolve(model)).glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def origin(model: str, name: str, *more: Any) -> str:
    """What makes trials of a method comparable, in two parts: 'ASKED-CODE', 16 hex digits each. ASKED: the model's
    weights, the method's parameters with its preset, and `more`. CODE: the files that decide what comes out
    (``sources``), the files that parameters name included. Origins of results made before code was part of them have
    the first part only."""
    method = methods.get(name)
    parameters = methods.make_parameters(method, settings(method, model, "")[0], {})
    digest = hashlib.sha256(json.dumps([model, weights(model), *more, repr(parameters)]).encode())
    for value in dataclasses.astuple(parameters):
        if isinstance(value, str) and value and Path(value).is_file():
            digest.update(Path(value).read_bytes())
    parts = {part.__module__ for part in getattr(method, "parts", (method,))}
    defined = sorted({*parts, *(type(task).__module__ for task in tasks.registry().values())})
    return f"{digest.hexdigest()[:16]}-{code(defined)}"


def made_otherwise(rows: Iterable[dict[str, Any]], origins: dict[str, str]) -> str:
    """One line about kept rows that are asked for and run again, since their origin is another; '' for none. A row that
    has been run again already is not counted."""
    rows = list(rows)
    again = {_asked(row) for row in rows if row["origin"] == origins[row["method"]]}
    stale = {_asked(row): row for row in rows if _asked(row) not in again}
    if not stale:
        return ""
    unversioned = sum("-" not in str(row["origin"]) for row in stale.values())
    older = f", {unversioned} of them before code was part of the comparison" if unversioned else ""
    names = ", ".join(sorted({str(row["method"]) for row in stale.values()}))
    return (
        f"{len(stale)} kept trials of {names} were made with other code, weights or settings{older}: they stay in the "
        "file and are run again."
    )


_ASKED = ("task", "length", "depth", "seed", "index", "method", "budget", "prompt", "arm")


def _asked(row: dict[str, Any]) -> tuple[Any, ...]:
    sentence = {"question": "in", "dtype": ""} | row
    return tuple(sentence.get(name) for name in (*_ASKED, "question", "dtype"))


def about(names: tuple[str, ...], model: str) -> dict[str, Any]:
    """Versions, machine and date, and the preset of each method."""
    import torch
    import transformers

    return {
        "kvlens": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "presets": {name: settings(methods.get(name), model, "")[0] for name in names},
    }


def _machine_of(provenance: dict[str, Any]) -> str:
    """Return the device, or processor and cores, and torch's version of a trial."""
    machine = provenance["machine"]
    device = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    return f"{device}, torch {provenance['torch']}"


def made_elsewhere(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return what of `about` the trials themselves record: versions, machine and date of the last of them (`made`), and
    how many each device made, those that do not record it apart. {} where no trial records it."""
    sources = [row.get("made") for row in rows]
    recorded = [source for source in sources if source is not None]
    if not recorded:
        return {}
    machines = Counter("not recorded" if source is None else _machine_of(source) for source in sources)
    return {**max(recorded, key=lambda source: str(source["date"])), "trials_by_device": dict(machines)}
