"""Makes the gallery of recorded losses: `kvlens/app/gallery/losses.json`, a file of two runs per method, and the story
that the first page plays (`story.json`).

Usage: python -m benchmarks.gallery [--methods NAMES] [--keep FOLDER] [--doc]. For each method the lengths and, under
each, the seeds are gone through in order, from another seed on for each method; the first prompt whose answer full KV
gives and the method does not is the one. It is then run as `kvlens run --against-full --oracle all` does, and of what
the Replay offers to hold each is held, as `kvlens whatif` does; shown is what brings the answer back with the fewest
bytes and leaves a tenth of the KL at the step of loss. `--methods`: others keep what they have.
docs/evidence/gallery.md quotes them; `--doc` renews that and makes nothing."""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gallery_page import DOC, with_losses
from kvlens import methods, tasks
from kvlens.app import gallery
from kvlens.app.gallery import story
from kvlens.app.gallery.bundle import hand_on, take_in
from kvlens.app.ui.replay.lenschoices import choices_of
from kvlens.budget import BudgetInfeasible
from kvlens.engine.engine import Engine
from kvlens.engine.models import load
from kvlens.lab.bench.provenance import about, origin
from kvlens.lab.bench.trialprompts import DEPTHS
from kvlens.lab.bench.trials import settings
from kvlens.lens.lines import ranges_in_words
from kvlens.lens.pieces import Piece
from kvlens.lens.trial_request import TrialRequest as Holding
from kvlens.lens.verdict import verdict
from kvlens.lens.whatif import whatif
from kvlens.metaparts import Counterfactual
from kvlens.models.find import SMOLLM2
from kvlens.runs.carrying import carry_out
from kvlens.runs.preparing import Prepared, plan
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.tasks import TaskPrompt
from kvlens.tasks.encoding import encoding_of
from kvlens.text.prompts import PromptText, tokenize

METHODS = (
    "sekv",
    "chess",
    "freekv",
    "sentkv",
    "compresskv",
    "snapkv",
    "streaming_llm",
    "h2o",
    "keydiff",
    "rkv",
    "seer",
    "retroinfer",
)
"""the papers' five, four that everybody knows, and three of the newer ones: decoded tokens evicted, a learned selection
and clusters that are estimated"""
STORY = "streaming_llm"
"""the loss that the first page plays: what was missed was evicted, so that nothing of it is left"""
BUDGET = "20%"
TASK, LENGTHS, SEEDS, STEPS = "niah_single", (384, 512, 640), 20, 8
LEFT = 0.1
"""of the KL at the step of loss, what a hold may leave to be shown before one of fewer bytes"""
HOLDS = 8
"""of the things that may be held, how many are tried at most"""


@dataclass(frozen=True)
class LostPrompt:
    """A prompt that a method loses."""

    asked: TaskPrompt
    length: int
    depth: float
    seed: int
    tried: int
    request: RunRequest


class Search:
    """One model, and the prompts in order."""

    def __init__(self, model: str) -> None:
        self.loaded = load(model)
        self.engine, self.print = Engine(self.loaded), self.loaded.fingerprint()
        self._full: dict[tuple[int, int], bool] = {}

    def prompts(self, first_seed: int) -> Iterator[tuple[int, float, int, TaskPrompt]]:
        """(length, depth, seed, prompt), lengths first; seeds from `first_seed` on."""
        encoding = encoding_of(self.loaded.tokenizer)
        for length in LENGTHS:
            for seed in range(first_seed, first_seed + SEEDS):
                depth = DEPTHS[seed % len(DEPTHS)]
                yield length, depth, seed, tasks.ask(tasks.get(TASK), length, depth, seed, encoding)

    def find_first(self, method: str) -> LostPrompt | None:
        """The first prompt that is lost; None where the method loses none of them, or none is within its budget."""
        _, overrides, rule = settings(methods.get(method), self.loaded.name, BUDGET)
        request = RunRequest(
            model=self.loaded.name,
            method=method,
            budget=BUDGET if rule == "resident bytes" else None,
            overrides=overrides,
            max_new=STEPS,
            against=True,
            oracle="all",
        )
        full = RunRequest(model=self.loaded.name, method=methods.REFERENCE, max_new=STEPS)
        for tried, (length, depth, seed, prompt) in enumerate(self.prompts(SEEDS * METHODS.index(method)), 1):
            source = tasks.prompt_of(prompt)
            if (length, seed) not in self._full:
                self._full[length, seed] = self.right(full, source)
            if not self._full[length, seed]:
                continue
            try:
                if not self.right(request, source):
                    return LostPrompt(prompt, length, depth, seed, tried, request)
            except BudgetInfeasible:
                continue
        return None

    def right(self, request: RunRequest, source: PromptText) -> bool:
        """Whether the answer comes out, nothing recorded."""
        prompt = tokenize(source, self.loaded.tokenizer, self.loaded.max_positions, request.max_new)
        planned = plan(request, Prepared(self.engine, prompt, self.print))
        options = replace(planned.options, coverage=False, oracle="off")
        result = self.engine.run(prompt, planned.method, planned.params, planned.budget, options)
        assert source.answer is not None
        return tasks.is_right(source.task, source.answer, result.text)


def silent(phase: str, done: int, total: int) -> None:
    """Nobody watches."""


def recorded(candidate: LostPrompt, runs: Path, folder: Path) -> gallery.Loss:
    """The loss run for real, what was missed held, both written as one file."""
    source = tasks.prompt_of(candidate.asked)
    uid, status, text = carry_out(candidate.request, source, runs, silent, lambda: False)
    assert status == "completed"
    assert not tasks.is_right(source.task, str(source.answer), text)
    held = restored(runs, uid)
    with TraceReader.open(runs, uid) as reader:
        meta, (sentence, why) = reader.meta, gallery.spoken(reader)
    file = folder / f"{candidate.request.method}.tar.xz"
    hand_on(runs, {uid: gallery.LEFT_OUT["run"], held.uid: gallery.LEFT_OUT["held"]}, file)
    data = file.read_bytes()
    assert meta.prompt_tokens is not None
    assert meta.full_kv_bytes is not None
    return gallery.Loss(
        method=candidate.request.method,
        preset=meta.preset,
        overrides=candidate.request.overrides,
        budget=BUDGET,
        model=candidate.request.model,
        task=TASK,
        length=candidate.length,
        depth=candidate.depth,
        seed=candidate.seed,
        tried=candidate.tried,
        prompt_tokens=meta.prompt_tokens,
        full_kv_bytes=meta.full_kv_bytes,
        question=source.text[source.question :].strip().removeprefix("Question: "),
        expected=str(source.answer).strip(),
        came=text.strip().partition("\n")[0],
        uid=uid,
        verdict=sentence,
        why=why,
        held=held,
        file=file.name,
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
    )


def restored(runs: Path, uid: str) -> gallery.Held:
    """What brings the answer back with the fewest bytes, of what may be held; the first of it where nothing does."""
    with TraceReader.open(runs, uid) as reader:
        loss = verdict(reader)
        assert loss is not None
        assert loss.missed is not None
        choices = choices_of(reader, loss.missed.span, loss)
    repeats = []
    for words, choice in list(choices.items())[:HOLDS]:
        stored, summary = whatif(runs, uid, Holding(pieces=choice, from_step=loss.step), silent)
        assert summary is not None
        assert summary.held_bytes is not None
        repeats.append((stored.uid, _words(words, choice), summary))
    held, words, summary = min(repeats, key=lambda repeat: _order(repeat[2]))
    assert summary.kl_before is not None
    assert summary.kl_after is not None
    assert summary.held_bytes is not None
    return gallery.Held(
        uid=held,
        words=words,
        answer=str(summary.answer_after).strip().partition("\n")[0],
        restored=bool(summary.restored),
        kl_before=summary.kl_before,
        kl_after=summary.kl_after,
        bytes=summary.held_bytes,
    )


def _order(summary: Counterfactual) -> tuple[int, int]:
    """First what brings the answer back and full KV's choice at the step of loss with it, then what brings back the
    answer alone, by a choice that stays close; of each the fewest bytes. The rest as it was tried."""
    assert summary.kl_before is not None
    assert summary.kl_after is not None
    assert summary.held_bytes is not None
    if not summary.restored:
        return 2, 0
    return int(summary.kl_after > LEFT * summary.kl_before), summary.held_bytes


def _words(offered: str, choice: tuple[Piece, ...]) -> str:
    """What was held, within a sentence."""
    tokens = tuple(piece.tokens for piece in choice if piece.tokens is not None)
    return ranges_in_words(tokens) if len(tokens) == len(choice) else offered


def main() -> None:
    """Makes the losses and writes the index."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--keep", type=Path, help="folder for the whole runs; default: none is kept")
    parser.add_argument("--doc", action="store_true", help="renew what evidence/gallery.md quotes, and nothing else")
    options = parser.parse_args()
    if options.doc:
        DOC.write_text(with_losses(DOC.read_text(encoding="utf-8")), encoding="utf-8")
        return
    names = tuple(options.methods.split(","))
    if unknown := set(names) - set(METHODS):
        parser.error(f"the gallery has no place for {', '.join(sorted(unknown))}; it has {', '.join(METHODS)}")
    torch.set_num_threads(1)
    search = Search(SMOLLM2)
    losses = {loss.method: loss for loss in gallery.losses()} if gallery.INDEX.is_file() else {}
    now = about((), SMOLLM2) | {"task": TASK, "lengths": LENGTHS, "seeds_per_method": SEEDS, "steps": STEPS}
    if set(names) >= set(losses):
        provenance: dict[str, Any] = now | {"origin": {}}
    else:
        provenance = dict(gallery.index().about)
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            candidate = search.find_first(name)
            if candidate is None:
                print(f"{name}: loses none of these prompts at {BUDGET}", flush=True)
                continue
            losses[name] = recorded(candidate, options.keep or Path(temporary), gallery.FOLDER)
            provenance["origin"] = {**provenance["origin"], name: origin(SMOLLM2, name)}
            if provenance["date"] != now["date"]:
                provenance["remade"] = {**provenance.get("remade", {}), name: now["date"]}
            print(
                f"{name}: {losses[name].verdict} {losses[name].held.restored} {losses[name].bytes:,} bytes", flush=True
            )
            ordered = [losses[name].model_dump() for name in METHODS if name in losses]
            text = json.dumps({"about": provenance, "losses": ordered}, ensure_ascii=False, indent=1)
            gallery.INDEX.write_text(text + "\n", encoding="utf-8")
    if STORY in names and STORY in losses:
        write_story(losses[STORY])


def write_story(loss: gallery.Loss) -> None:
    """Writes the story of the first page from the runs that are handed on with a loss."""
    with tempfile.TemporaryDirectory() as runs:
        take_in(gallery.FOLDER / loss.file, Path(runs), (loss.uid, loss.held.uid))
        recorded_story = story.story_of(loss, Path(runs))
    story.FILE.write_text(recorded_story.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
