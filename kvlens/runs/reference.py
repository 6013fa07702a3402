"""The full-KV reference of a prompt: an ordinary stored run, with the logits of every step beside its trace.

It is found again by what makes two references the same: model, prompt, numbers, and how tokens are chosen.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.engine.comparison import Reference
from kvlens.files import KEPT_MODE
from kvlens.refusal import Refusal
from kvlens.runs.aheadfiles import move_reference, references
from kvlens.runs.preparing import Pairing, Prepared, plan, reference_key
from kvlens.runs.readings import reading
from kvlens.runs.request import Report, RunRequest
from kvlens.runs.storing import store
from kvlens.runs.trace import Watcher
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader, list_runs

if TYPE_CHECKING:
    import torch

    from kvlens.engine.engine import Result
LOGITS_FILE = "logits.safetensors"
SHARED_PHASES = ("prefill", "surprisal")
"""of a reference that is made now, whose results the run takes over"""
MOST_BYTES = 8 * 2**30
"""of logits, above which no reference is made"""


def find(runs_dir: Path, key: str) -> str | None:
    """uid of the newest stored full-KV run with this key, whether or not its logits lie beside it."""
    runs = list_runs(runs_dir)
    own_value = ~runs["forced"].eq(True) & ~runs["hold"].eq(True)
    plain = (runs["method"] == "full") & (runs["status"] == "completed") & own_value
    results = runs[plain & (runs["reference_key"] == key)]
    return None if results.empty else str(results["uid"].iloc[0])


def obtain(
    prepared: Prepared,
    request: RunRequest,
    runs_dir: Path,
    report: Report,
    cancelled: Callable[[], bool] = lambda: False,
    watcher: Watcher | None = None,
) -> Reference:
    """The reference of a request's prompt: loaded, or made and stored, which `watcher` sees. Logits that are missing or
    damaged are computed again.

    Raises ValueError with one sentence when the logits would be too large, when the run itself would be refused (no
    reference is made for it then), or when it was cancelled.
    """
    key, vocabulary = reference_key(request, prepared), prepared.engine.loaded.model.config.vocab_size
    size = 4 * vocabulary * (len(prepared.prompt.asked) + request.max_new)
    if size > MOST_BYTES:
        raise ValueError(
            f"a reference of {request.max_new:,} steps would keep {size:,} bytes of logits; at most "
            f"{MOST_BYTES:,} are kept: "
            "lower --max-new."
        )
    uid = find(runs_dir, key) or _made_ahead(runs_dir, key)
    if uid is not None:
        reference = load(runs_dir, uid, key) or _compute_again(prepared, request, runs_dir, uid, key, report, cancelled)
        if reference is not None:
            return reference
    return _make(prepared, request, runs_dir, key, report, cancelled, watcher)


def _made_ahead(runs_dir: Path, key: str) -> str | None:
    """Return the uid of a reference that was made before its run was asked for, once it is among the runs."""
    folder = references()
    if folder is None or folder == runs_dir or not folder.is_dir():
        return None
    uid = find(folder, key)
    return uid if uid is not None and move_reference(uid, folder, runs_dir) else None


def load(runs_dir: Path, uid: str, key: str) -> Reference | None:
    """A stored reference; None where its logits are missing, damaged, or not this key's."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(runs_dir / uid / LOGITS_FILE, framework="pt") as file:
            sentence, ids, logits = file.metadata() or {}, file.get_tensor("ids"), file.get_tensor("logits")
    except (OSError, SafetensorError):
        return None
    whole = sentence.get("key") == key and sentence.get("sha256") == _digest(ids, logits)
    if not whole or logits.dtype != torch.float32 or logits.dim() != 2 or len(ids) != len(logits):
        return None
    return Reference(uid, tuple(ids.tolist()), logits)


def _full(request: RunRequest) -> RunRequest:
    """The same run under full KV, with as much recorded of it."""
    changes: dict[str, Any] = {
        "method": "full",
        "preset": None,
        "budget": None,
        "overrides": {},
        "against": False,
        "forced_reference": False,
        "hold": (),
        "drop": (),
    }
    return request.model_copy(update=changes)


def _make(
    prepared: Prepared,
    request: RunRequest,
    runs_dir: Path,
    key: str,
    report: Report,
    cancelled: Callable[[], bool],
    watcher: Watcher | None,
) -> Reference:
    _rehearse(prepared, request, report, cancelled)
    full, pairing = _full(request), Pairing(reference_key=key)
    planned, lines = plan(full, prepared), _renamed(report)
    stored = store(prepared, full, planned, pairing, runs_dir, lines, cancelled, keep_logits=True, watcher=watcher)
    if stored.result is None:
        raise Refusal(
            f"cancelled while the full-KV reference was being made; what was recorded of it is stored as {stored.uid}.",
            code="cancelled",
            uid=stored.uid,
        )
    return _save(runs_dir, stored.uid, key, stored.result)


def _rehearse(prepared: Prepared, request: RunRequest, report: Report, cancelled: Callable[[], bool]) -> None:
    """Raises what the run would raise before it decodes anything, so that a refused run leaves no reference behind."""
    from kvlens.engine.engine import Cancelled

    planned = plan(request, prepared)

    def read_line(phase: str, finished: int, total: int) -> None:
        if cancelled():
            raise Cancelled
        report(phase, finished, total)

    def check_line(phase: str, finished: int, total: int) -> None:
        report("check", finished, total)

    read = reading(prepared, planned, read_line, ahead=True)
    try:
        prepared.engine.rehearse(
            prepared.prompt,
            planned.method,
            planned.params,
            planned.budget,
            planned.options,
            check_line,
            cancelled,
            request.hold,
            request.drop,
            read,
        )
    except Cancelled:
        raise Refusal(
            "cancelled before the full-KV reference was made; nothing was stored.", code="cancelled"
        ) from None


def _compute_again(
    prepared: Prepared,
    request: RunRequest,
    runs_dir: Path,
    uid: str,
    key: str,
    report: Report,
    cancelled: Callable[[], bool],
) -> Reference | None:
    """The logits of a stored full-KV run, by repeating it without recording; None if it does not come to the same
    tokens."""
    from kvlens.engine.engine import Cancelled

    try:
        with TraceReader.open(runs_dir, uid) as reader:
            tokens = reader.tokens()
    except TraceError:
        return None
    planned = plan(_full(request), prepared)
    try:
        result = prepared.engine.run(
            prepared.prompt,
            planned.method,
            planned.params,
            planned.budget,
            planned.options,
            None,
            _renamed(report),
            cancelled,
            keep_logits=True,
        )
    except Cancelled:
        raise Refusal(
            "cancelled while the logits of the full-KV reference were being computed.", code="cancelled"
        ) from None
    stored = tokens[tokens["step"].notna()].sort_values("step")["token_id"].tolist()
    return _save(runs_dir, uid, key, result) if stored == result.ids else None


def _renamed(report: Report) -> Report:
    """Progress of a reference: its steps have a phase of their own. The run shares its reading of the prompt and the
    surprisals, so those phases keep their names."""

    def lines(phase: str, finished: int, total: int) -> None:
        if phase in SHARED_PHASES:
            report(phase, finished, total)
        elif phase == "decode":
            report("reference", finished, total)

    return lines


def _save(runs_dir: Path, uid: str, key: str, result: Result) -> Reference:
    import torch
    from safetensors.torch import save_file

    ids, logits = torch.tensor(result.ids), torch.stack(result.logits).cpu()
    target = runs_dir / uid / LOGITS_FILE
    temporary = target.with_name(f".{LOGITS_FILE}.{os.getpid()}")
    try:
        save_file({"ids": ids, "logits": logits}, temporary, {"key": key, "sha256": _digest(ids, logits)})
        os.chmod(temporary, KEPT_MODE)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return Reference(uid, tuple(result.ids), logits)


def _digest(ids: torch.Tensor, logits: torch.Tensor) -> str:
    whole = hashlib.sha256(ids.numpy().tobytes())
    whole.update(logits.numpy().tobytes())
    return whole.hexdigest()
