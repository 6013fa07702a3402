"""Whether full KV here equals the model's own `generate`: compared once per model, on one prompt, and kept.

The prompt passes 1.1 times the position at which the model's rotary frequencies change, where it has such a border. The
verdict is a small file in the models' cache, by the model's fingerprint, the number format, the device and the versions
of torch, transformers and kvlens.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlens.engine.modelfiles import file_stamp
from kvlens.files import cache_dir, read_plain, write_plain
from kvlens.models.device import host_bytes
from kvlens.runs.checkprompt import check_prompt
from kvlens.text.units import si_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvlens.engine.engine import Engine

MODEL_CHECK = "model equals its generate"
"""name of the self-check of a run"""
EQUAL, DIFFERS, UNCHECKED = "equal", "differs", "not checked"
FOLDER = "checks"
"""of the models' cache"""
SHORT, NEW = 96, 8
"""tokens of the prompt of a model without a border, and tokens that are generated"""
PAST = 1.1
"""share of the border that the prompt has"""
TIE = 1e-3
"""logits between the two best tokens below which another order of sums may choose the other"""
FIRST_RUN_WORK = {"cpu": 1e11, "cuda": 1e13}
"""parameters times tokens that a first run may compute twice: seconds, not minutes"""
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class ModelCheck:
    """The verdict on one model."""

    verdict: str
    """EQUAL, DIFFERS or UNCHECKED"""
    tokens: int
    """of the prompt; of an unchecked model those that it would take"""
    border: int | None
    """tokens beyond which the model's rotary frequencies change; None: they never do"""
    compared: int = 0
    """generated tokens that were compared"""
    reason: str = ""
    """why it was not checked, or where it differs"""
    seconds: float = 0.0
    model: str = ""
    """its name when it was compared"""
    dtype: str = ""
    device: str = ""
    files: str = ""
    """stamp of the model's files, see `fingerprint.file_stamp`"""
    versions: tuple[str, ...] = ()
    """of torch, transformers and kvlens"""

    @property
    def sentence(self) -> str:
        """The verdict as commands print it."""
        if self.verdict == UNCHECKED:
            return f"not checked: {self.reason}"
        past = "" if self.border is None else f", past the border at {self.border:,}"
        result = f"equal {self.compared} tokens" if self.verdict == EQUAL else self.reason
        return f"{result} of generate after {self.tokens:,} prompt tokens{past} ({self.seconds:.1f} s)"


def known_check(engine: Engine, fingerprint: str) -> ModelCheck | None:
    """Return the verdict that is kept for this model; None if there is none."""
    verdict = _read(_place(engine, fingerprint))
    stamp, versions = file_stamp(engine.loaded.name), _versions()
    if verdict is not None and (verdict.files, verdict.versions) != (stamp, versions):  # its place names the versions
        verdict = replace(verdict, files=stamp, versions=versions, model=engine.loaded.name)
        _keep(engine, fingerprint, verdict)
    return verdict


def checks_of(name: str) -> list[ModelCheck]:
    """Return the verdicts that hold for the model of this name as its files and the libraries are now, the latest
    first."""
    files = sorted((cache_dir() / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    stamp, versions = file_stamp(name), _versions()
    return [
        verdict
        for verdict in map(_read, files)
        if verdict is not None
        and verdict.versions == versions
        and (verdict.files == stamp if stamp else verdict.model == name)
    ]


def worst_check(name: str) -> ModelCheck | None:
    """Return the latest verdict that differs, else the latest, of the model as it is now; None if it was not
    checked."""
    verdicts = checks_of(name)
    return next((verdict for verdict in verdicts if verdict.verdict == DIFFERS), verdicts[0] if verdicts else None)


def verdict_words(check: Mapping[str, Any] | None) -> str:
    """Return whether full KV equals the model's own generate, by a run's meta (`model_check`), in a few words."""
    verdict = None if check is None else check.get("verdict")
    return {
        EQUAL: "full KV equals generate",
        DIFFERS: "full KV differs from generate",
        UNCHECKED: "full KV not checked against generate",
    }.get(str(verdict), "check against generate not recorded")


def _read(path: Path) -> ModelCheck | None:
    """Return a kept verdict; None where the file is missing or damaged."""
    try:
        fields = json.loads(read_plain(path, _MOST_BYTES))
        return ModelCheck(**fields | {"versions": tuple(fields.get("versions", ()))})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _keep(engine: Engine, fingerprint: str, verdict: ModelCheck) -> None:
    """Write a verdict. A cache that cannot be written is no error: the next run compares again."""
    place = _place(engine, fingerprint)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_plain(place, json.dumps(asdict(verdict)).encode(), durable=False)


def _versions() -> tuple[str, str, str]:
    """Return the versions of torch, transformers and kvlens, without importing the libraries."""
    from importlib.metadata import version

    from kvlens import __version__

    return version("torch"), version("transformers"), __version__


def first_check(engine: Engine, fingerprint: str) -> ModelCheck:
    """Return the verdict on a model that is about to run: the kept one, or a new one where that takes seconds."""
    kept_verdict = known_check(engine, fingerprint)
    if kept_verdict is not None:
        return kept_verdict
    loaded = engine.loaded
    tokens, border = prompt_tokens(engine)
    work = loaded.info["parameters"] * tokens
    if work > FIRST_RUN_WORK.get(loaded.model.device.type, 0):
        reason = f"{tokens:,} tokens take long: kvlens doctor --model {loaded.name} does it"
        return ModelCheck(UNCHECKED, tokens, border, reason=reason)
    return check_model(engine, fingerprint)


def check_model(engine: Engine, fingerprint: str) -> ModelCheck:
    """Compare full KV with `generate` and keep the verdict. A verdict for want of memory is not kept."""
    model = engine.loaded.model
    names: dict[str, Any] = {
        "model": engine.loaded.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "files": file_stamp(engine.loaded.name),
        "versions": _versions(),
    }
    try:
        verdict = replace(_compare(engine), **names)
    except Exception as error:  # what is wrong with a model's own generate must not end a run
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return ModelCheck(UNCHECKED, *prompt_tokens(engine), reason=reason, **names)
    if verdict.verdict != UNCHECKED:
        _keep(engine, fingerprint, verdict)
    return verdict


def prompt_tokens(engine: Engine) -> tuple[int, int | None]:
    """Return the number of tokens that the comparison reads, and the border that they pass, if any: where rotary
    frequencies change, or where a sliding window begins to bind."""
    from kvlens.engine.rotary import border_of

    loaded = engine.loaded
    binding = (window for window in loaded.shape.windows if window < loaded.max_positions)
    border = max(border_of(loaded.model.config) or 0, *binding, 0) or None
    return (SHORT if border is None else math.ceil(PAST * border) + 1), border


def _compare(engine: Engine) -> ModelCheck:
    """The comparison itself."""
    from kvlens import methods
    from kvlens.checking.stock import generated
    from kvlens.engine.engine import Options
    from kvlens.engine.options import NonFiniteLogits

    tokens, border = prompt_tokens(engine)
    refusal = _refusal(engine, tokens)
    if refusal:
        return ModelCheck(UNCHECKED, tokens, border, reason=refusal)
    prompt, start = check_prompt(engine, tokens), time.perf_counter()
    full = methods.get(methods.REFERENCE)
    try:
        ours = engine.run(prompt, full, full.Parameters(), None, Options(max_new=NEW), keep_logits=True)
    except NonFiniteLogits as error:
        return ModelCheck(DIFFERS, tokens, border, reason=str(error))
    theirs = generated(engine.loaded.model, prompt.ids, NEW)
    seconds, compared = round(time.perf_counter() - start, 2), min(len(ours.ids), len(theirs))
    for place in range(compared):
        best = ours.logits[place].topk(2).values
        if ours.ids[place] != theirs[place] and float(best[0] - best[1]) > TIE:
            reason = f"other token at step {place}: {ours.ids[place]} here, {theirs[place]}"
            return ModelCheck(DIFFERS, tokens, border, place, reason, seconds)
        if ours.ids[place] != theirs[place]:
            compared = place  # two tokens of equal logits: the texts go apart for no fault
            break
    return ModelCheck(EQUAL, tokens, border, compared, seconds=seconds)


def _refusal(engine: Engine, tokens: int) -> str:
    """Why a model cannot be compared on so many tokens; empty if it can."""
    loaded, needed = engine.loaded, 3 * (tokens + NEW) * engine.loaded.shape.token_bytes
    if tokens + NEW > loaded.max_positions:
        return f"{tokens:,} tokens are more than the model's {loaded.max_positions:,}"
    free = _free_bytes(loaded.model.device.type)
    if free is not None and needed > free:
        return f"{tokens:,} tokens need {si_bytes(needed)} of memory, and {si_bytes(free)} are free"
    return ""


def _free_bytes(device: str) -> int | None:
    """Bytes of memory that could be taken on a device; None: unknown."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return host_bytes()


def _place(engine: Engine, fingerprint: str) -> Path:
    """The file of a verdict."""
    model = engine.loaded.model
    parts = (fingerprint, model.dtype, model.device.type, *_versions())
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
    return cache_dir() / FOLDER / f"{digest[:32]}.json"
