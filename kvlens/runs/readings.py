"""Prompts that were read before. The app names a folder of its own for them, so that a run's reference, its repeats and
every what-if on the same prompt begin with placing it. Studies have one, for all workers and later studies. Runs of a
race or of questions about one context share a reading in memory, as do a run and the reference that it makes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens import __version__
from kvlens.files import FOLDER_MODE, close_file, keep_newest
from kvlens.models.device import host_bytes
from kvlens.runs.aheadfiles import note_time, take_time
from kvlens.runs.preparing import READINGS, Kept, Plan, Prepared

if TYPE_CHECKING:
    import torch

    from kvlens.engine.prefill import ReadPrompt, Surprisals
    from kvlens.methods.base import Method

MOST_BYTES = 1 << 30
"""of the folder; what was used longest ago goes first"""
FREE_SHARE = 0.25
"""of the free memory, that a reading takes at most: a run's own copy of the KV and its attention lie beside it"""
QUERIES = 128
"""the last queries that are kept at least, so that one reading serves many methods"""
Told = Callable[[str, int, int], None]


class Reading:
    """What reads a run's prompt for the engine (kvlens.engine.prefill.Reader), or has it of an earlier run. It is the
    same numbers as the run's own prefill: the key holds all that decides them."""

    def __init__(self, prepared: Prepared, planned: Plan, folder: Path | None, told: Told, ahead: bool) -> None:
        """folder: None where prompts are kept in this process alone. ahead: it is read before its first run."""
        self._prepared, self._planned, self._folder, self._told = prepared, planned, folder, told
        self._ahead = ahead
        self.kept = False
        """whether an earlier run had read it"""
        self._path: Path | None = None
        """where it lies; None: nowhere, or its surprisals lie there too"""

    def __call__(self) -> ReadPrompt:
        prompt, method, holder = self._prepared.prompt, self._planned.method, self._prepared.kept
        if holder is not None and holder.read is not None and holder.read.serves(method):
            return holder.read if self._ahead else self._take(holder, holder.read)
        path = None if self._folder is None else self._folder / f"{_key(self._prepared, self._planned)}.safetensors"
        reading = None if path is None else _load(path, self._prepared)
        queries = max(QUERIES, method.needs.queries, 0 if holder is None else holder.queries)
        received = method.needs.received or (holder is not None and holder.received)
        if reading is None or not reading.serves(method) or (received and reading.received is None):
            chunk = self._planned.options.prefill_chunk
            received = received or (reading is not None and reading.received is not None)
            start_ns = time.perf_counter_ns()
            reading = self._prepared.engine.read(prompt, chunk, queries, received, self._told)
            spent_ns = time.perf_counter_ns() - start_ns
            if path is not None:
                with contextlib.suppress(OSError):  # a full disk costs the next run its head start, nothing else
                    _save(path, reading)
                note_time(path, spent_ns if self._ahead and holder is None else 0)
        elif path is not None:
            spent_ns = 0 if self._ahead and holder is None else take_time(path)
            self.kept, reading = not spent_ns, reading if self._ahead else replace(reading, ahead_ns=spent_ns)
            with contextlib.suppress(OSError):
                os.utime(path)
        if self._ahead and holder is not None:
            holder.ahead_ns = spent_ns
        self._path = path if reading.surprisal.known is None else None
        if holder is not None:
            reading = reading.for_turns() if holder.in_turns else reading
            holder.read = replace(reading, ahead_ns=0) if reading.ahead_ns else reading
        return reading

    def _take(self, holder: Kept, read: ReadPrompt) -> ReadPrompt:
        """Return a reading that is at hand, for a run. The first run after a budget check counts its reading."""
        spent_ns, holder.ahead_ns = holder.ahead_ns, 0
        self.kept = not spent_ns
        return replace(read, ahead_ns=spent_ns) if spent_ns else read

    def learned(self, surprisal: Surprisals) -> None:
        """A run has asked for the surprisals of the prompt: the folder keeps them beside what they are made of, so that
        its other runs need not compute them. Whatever goes wrong costs those the time and this one nothing: it has
        ended."""
        if self._path is None or surprisal.known is None:
            return
        with contextlib.suppress(Exception):
            _put(_beside(self._path), {"surprisal": surprisal.known})
        self._path = None


def keeping(kinds: Sequence[type[Method]], in_turns: bool = False) -> Kept:
    """What is to be read of a prompt so that one reading serves runs of all these methods. in_turns: see Kept."""
    queries = max([QUERIES, *(method.needs.queries for method in kinds)])
    return Kept(queries, any(method.needs.received for method in kinds), in_turns=in_turns)


def reading(prepared: Prepared, planned: Plan, told: Told, ahead: bool = False) -> Reading | None:
    """None where the run reads its prompt itself: the method has to be there while it is read, or it is kept nowhere. A
    folder has to be named, and keeps what was read on a CPU and fits. told: as the engine's progress; what it raises
    ends the reading. ahead: for a budget check, before the first run."""
    if planned.method.needs_with(planned.params).own_prompt:
        return None
    folder = _folder(prepared, planned)
    if folder is None and prepared.kept is None:
        return None
    return Reading(prepared, planned, folder, told, ahead)


def shared(prepared: Prepared, planned: Plan) -> Prepared:
    """Return what the budget check, the reference, the run and its effects share: one reading of the prompt, where it
    is small enough for the free memory beside them. A run that reads the prompt under attention of its own has the
    reference's reading for full KV beside it, whatever its size."""
    needs_full = planned.method.needs_with(planned.params).reading
    if prepared.kept is not None or not (needs_full or _size(prepared, planned) <= _room(prepared)):
        return prepared
    return replace(prepared, kept=keeping([planned.method]))


def full_reading(prepared: Prepared, planned: Plan, progress: Told) -> ReadPrompt:
    """Return a full-KV reading of a run's prompt for a method that reads the prompt under attention of its own: one
    that is at hand, else a new one. progress: as the engine's progress; what it raises ends the reading."""
    if prepared.kept is not None and prepared.kept.read is not None:
        return prepared.kept.read
    return Reading(prepared, planned, _folder(prepared, planned), progress, False)()


def _folder(prepared: Prepared, planned: Plan) -> Path | None:
    """Return the folder that keeps a reading; None where none is named or the reading is too large."""
    named = os.environ.get(READINGS)
    folder = Path(named) if named else prepared.readings
    return folder if folder is not None and fits(prepared, planned) else None


def _room(prepared: Prepared) -> int:
    """Bytes that a reading may take beside the runs that share it: a share of the memory that is free where the model
    is, and what a folder would keep of it at least."""
    device = prepared.engine.loaded.model.device
    if device.type == "cuda":
        import torch

        free = int(torch.cuda.mem_get_info(device)[0])
    else:
        free = host_bytes() or 0
    return max(MOST_BYTES // 2, int(FREE_SHARE * free))


def fits(prepared: Prepared, planned: Plan) -> bool:
    """A reading is small enough to stay at hand, in memory that is not a device's."""
    return prepared.engine.loaded.model.device.type == "cpu" and _size(prepared, planned) <= MOST_BYTES // 2


def _size(prepared: Prepared, planned: Plan) -> int:
    """Bytes of a reading, about."""
    shape, n = prepared.engine.loaded.shape, len(prepared.prompt.ids)
    received = 4 * shape.layers * shape.q_heads * n if planned.method.needs.received else 0
    return n * shape.token_bytes + received


def _key(prepared: Prepared, planned: Plan) -> str:
    import torch
    import transformers

    fields = {
        "kvlens": __version__,
        "model": prepared.fingerprint,
        "prompt": list(prepared.prompt.ids),
        "dtype": str(prepared.engine.loaded.model.dtype),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "prefill_chunk": planned.options.prefill_chunk,
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def _save(path: Path, read: ReadPrompt) -> None:
    tensors = {name: getattr(read, name) for name in ("keys", "values", "last_queries", "received")}
    tensors |= read.surprisal.state()
    tensors |= {f"peeked.{field.name}": getattr(read.peeked, field.name) for field in fields(read.peeked)}
    _put(path, {name: tensor for name, tensor in tensors.items() if tensor is not None})


def _beside(path: Path) -> Path:
    """Return where the surprisals are that a run computed of a reading without them: 4 bytes a token."""
    return path.with_suffix(f".surprisal{path.suffix}")


def _put(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Whole or not at all; then what is too much in the folder goes. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)  # a folder above it that is gone stays gone
    part = path.with_suffix(f".{os.getpid()}")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part)
        close_file(part)
        part.replace(path)
    except SafetensorError as error:  # which is how it tells of a full disk
        raise OSError(str(error)) from error
    finally:
        part.unlink(missing_ok=True)
    keep_newest(path.parent, MOST_BYTES, path.suffix)


def _load(path: Path, prepared: Prepared) -> ReadPrompt | None:
    """None where there is none, or it is damaged: then it is made again."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from kvlens.engine.prefill import ReadPrompt, Surprisals
    from kvlens.methods.run_inputs import Peeked

    ids = prepared.prompt.ids
    try:
        tensors = load_file(path) | _read_surprisals(path, len(ids))
        peeked = Peeked(*(tensors[f"peeked.{field.name}"] for field in fields(Peeked)))
        return ReadPrompt(
            ids,
            tensors["keys"],
            tensors["values"],
            tensors["last_queries"],
            peeked,
            Surprisals.restored(prepared.engine.loaded, ids, tensors),
            tensors.get("received"),
        )
    except (OSError, SafetensorError, KeyError):
        return None


def _read_surprisals(path: Path, tokens: int) -> dict[str, torch.Tensor]:
    """Return {"surprisal": float32 [tokens]}; {} where no run has put them beside a reading, or they are damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        surprisal = load_file(_beside(path))["surprisal"]
    except (OSError, SafetensorError, KeyError):
        return {}
    return {"surprisal": surprisal} if surprisal.shape == (tokens,) else {}
