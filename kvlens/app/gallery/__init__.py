"""The gallery: recorded losses on a real model, one for each of some methods, that open without loading a model.

`losses.json` is the index, each `NAME.tar.xz` beside it holds two runs: the one that lost, and the same run with what
it missed held. `benchmarks/gallery.py` makes them all; what the index says of a run is computed from its trace.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvlens.app.gallery.bundle import take_in
from kvlens.lens.verdict import Verdict, verdict
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from kvlens.text.units import si_bytes

FOLDER = Path(__file__).parent
INDEX = FOLDER / "losses.json"
LEFT_OUT = {"run": ("span_key",), "held": ("span_key", "oracle")}
"""tables of the two runs that are not handed on: they would be most of the bytes"""


class Held(BaseModel):
    """What came of holding what was missed: a run of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uid: str
    words: str
    """what was held"""
    answer: str
    restored: bool
    kl_before: float
    kl_after: float
    """nats, at the step of loss"""
    bytes: int
    """of keys and values that were held"""

    def sentence(self, full_kv_bytes: int) -> str:
        """What holding it gave back, and for how much."""
        cost = f"{si_bytes(self.bytes)}, {self.bytes / full_kv_bytes:.2%} of full KV"
        came = "brings the answer back" if self.restored else f"does not bring the answer back (“{self.answer}”)"
        kl = f"KL at the step of loss {self.kl_before:.3g} → {self.kl_after:.3g} nats"
        return f"Holding {self.words} ({cost}) {came}; {kl}."


class Loss(BaseModel):
    """One recorded loss."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    preset: str | None
    overrides: dict[str, float]
    budget: str
    """a share of full KV, or of attended tokens for a method that keeps every token"""
    model: str
    task: str
    length: int
    depth: float
    seed: int
    """the first one, in order, with which the method loses an answer that full KV gives"""
    tried: int
    """seeds up to it"""
    prompt_tokens: int
    full_kv_bytes: int
    question: str
    expected: str
    came: str
    """the output's first line"""
    uid: str
    verdict: str
    why: str
    held: Held
    file: str
    sha256: str
    bytes: int

    @property
    def cause(self) -> str:
        """Why what was missed was not there, as far as its rank: without what stands in brackets and what follows."""
        return re.split(";|, this one was", re.sub(r" \([^()]*\)", "", self.why))[0]

    @property
    def place(self) -> str:
        """Return who missed what: 'L18 KV2 missed span 7'."""
        match = re.search(r"L\d+ KV\d+ missed span \d+", self.verdict)
        return match.group() if match else "What it missed"

    @property
    def limit(self) -> str:
        """'20% of its KV cache', or of the tokens it attends."""
        return f"{self.budget} of {'the tokens to attend' if self.overrides else 'its KV cache'}"


class Index(BaseModel):
    """All of them, and on what they were made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: dict[str, object]
    losses: tuple[Loss, ...]


@cache
def index() -> Index:
    """The index that comes with this kvlens."""
    return Index.model_validate(json.loads(INDEX.read_text(encoding="utf-8")))


def losses() -> tuple[Loss, ...]:
    """The recorded losses, in the order in which they are shown."""
    return index().losses


def loss_of(uid: str) -> Loss | None:
    """The recorded loss whose run this is; None for any other run."""
    return next((loss for loss in losses() if loss.uid == uid), None)


def bring(loss: Loss, runs_dir: Path) -> str:
    """Puts a loss's runs among the runs, unless they are there; returns the uid of the one that lost.

    Raises TraceError with one sentence where its file is not the one of the index, or cannot be unpacked."""
    uids = [uid for uid in (loss.uid, loss.held.uid) if not (runs_dir / uid).is_dir()]
    if uids:
        file = FOLDER / loss.file
        try:
            same = hashlib.sha256(file.read_bytes()).hexdigest() == loss.sha256
        except OSError:
            same = False
        if not same:
            raise TraceError(
                f"{loss.file} is missing from the gallery or was changed; install kvlens again.",
                code="gallery_changed",
                file=loss.file,
            )
        take_in(file, runs_dir, (loss.uid, loss.held.uid))
    return loss.uid


def verdict_sentence(loss: Verdict) -> str:
    """The verdict as one sentence, as the index keeps it."""
    sentence = f"Lost at step {loss.step}: full KV says {loss.expected!r}, this run {loss.got!r}"
    if (missed := loss.missed) is None:
        why = "nothing was missed" if loss.nothing_missed else "what was missed most was not recorded"
        return f"{sentence}; {why}."
    masses = missed.mass_words()
    if said_of_effect := missed.effect_words():
        masses = f"{said_of_effect}; {masses}"
    return (
        f"{sentence}; L{missed.layer} KV{missed.kv_head} missed span {missed.span}, tokens "
        f"{missed.tok_start}–{missed.tok_end - 1}: {masses}."
    )


def spoken(reader: TraceReader) -> tuple[str, str]:
    """(verdict, why) of a run, from its trace. Raises TraceError for a run that lost nothing."""
    loss = verdict(reader)
    if loss is None or loss.missed is None:
        raise TraceError(f"Run {reader.uid} has no loss with a missed span.")
    return verdict_sentence(loss), loss.missed.reason.says
