"""CompressKV's offline figures for a model: semantic and traditional retrieval heads, and layer errors, on generated
needle prompts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlens.demo.tasks import make_prompt
from kvlens.engine.engine import Engine
from kvlens.engine.models import LoadedModel
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.calibrate.fullrun import watch
from kvlens.lab.calibrate.methods.compresskv_scores import KINDS, HeadScores, LayerErrors
from kvlens.lab.calibrate.projection import output_projections
from kvlens.lab.calibrate.provenance import provenance, save
from kvlens.lab.calibrate.texts import sentences
from kvlens.methods.compresskv.heads import choose_heads
from kvlens.methods.families import window_attention as window
from kvlens.text.chat import template_of
from kvlens.text.prompts import Prompt, PromptText, tokenize

SHORTEST = 128
"""tokens of a generated prompt at least"""


@dataclass(frozen=True)
class Settings:
    """How to calibrate. Lengths in tokens. The authors' numbers unless marked ours."""

    max_steps: int = 50
    """tokens generated per trial"""
    recall: float = 0.5
    """a trial counts when more than this share of the answer's words (ROUGE-1 recall) came out"""
    window: int = 8
    """last prompt tokens, the very last included"""
    kernel: int = 5
    top_heads: int = 4
    epsilon: float = 1e-6
    """of eq. 4 (the authors' code has 1e-5)"""
    minimal: int = 32
    """ours: prompt tokens per layer of the 'minimal-size compression' under which layer errors are measured"""
    span: str = "answer"
    """ours: the answer span of eq. 1. answer: the tokens of the value (the authors' code); sentence: of the sentence
    that states it"""
    top: int = 0
    """ours: k of the top-k rule of traditional retrieval heads; 0: the answer span's length (as HeadKV)"""
    kinds: tuple[str, ...] = ("code", "badge", "pass", "note", "born", "job")
    """ours: kinds of facts that are asked, in turn"""
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    """ours: lengths of the prompts as shares of the largest, in turn"""
    first_seed: int = 9_000_000


@dataclass(frozen=True)
class Trial:
    """A needle prompt and the prompt positions of its answer span."""

    prompt: Prompt
    answer: str
    span: list[int]


def make_trials(
    loaded: LoadedModel, sources: Sequence[PromptText], trials: int, length: int, settings: Settings
) -> Iterator[Trial]:
    """Prompts to measure on. A source with an answer and a needle is asked as it is, once; the sentences of the others
    hide generated needles, at depths 0 to 1, lengths and kinds of facts in turn, in the model's own tokens; without
    any, generated filler does.

    Raises ValueError when a text is too short to hide a needle, BadPrompt for a source that does not fit the model.
    """

    def encode(text: str) -> list[int]:
        return list(loaded.tokenizer.encode(text, add_special_tokens=False))

    def ready(source: PromptText, answer: str) -> Trial:
        prompt = tokenize(source, loaded.tokenizer, loaded.max_positions, settings.max_steps)
        return Trial(prompt, answer, answer_span(prompt, answer, settings.span))

    for source in sources:
        if source.answer and source.needle:
            yield ready(source, source.answer)
    texts = [source.text for source in sources if not (source.answer and source.needle)]
    if sources and not texts:
        return
    lengths = [max(SHORTEST, int(length * share)) for share in settings.shares]
    for index in range(trials):
        target, kind = lengths[index % len(lengths)], settings.kinds[index % len(settings.kinds)]
        filler = sentences(texts[index % len(texts)]) if texts else None
        depth = (index * 7 % trials) / max(trials - 1, 1)
        result = make_prompt("needle", target, depth, settings.first_seed + index, encode, kind=kind, filler=filler)
        trial = ready(PromptText(result.text, result.answer, result.needle), result.answer)
        if texts and len(trial.prompt.ids) < target // 2:
            raise ValueError(
                f"a text that needles shall be hidden in has too few sentences for {target} tokens: give a longer one."
            )
        yield trial


def answer_span(prompt: Prompt, answer: str, span: str) -> list[int]:
    """Positions of the tokens of the answer inside the needle, or of the whole needle (span 'sentence', or where the
    answer does not stand in it word by word)."""
    ranges = list(prompt.source.needle)
    value = answer.strip().rstrip(".")
    if span == "answer":
        inside = [
            (position, position + len(value))
            for a, b in ranges
            if (position := prompt.source.text.find(value, a, b)) >= 0
        ]
        ranges = inside or ranges
    return [i for i, o in enumerate(prompt.offsets) if o and any(o[0] < b and o[1] > a for a, b in ranges)]


def recall(answer: str, output: str) -> float:
    """ROUGE-1 recall without stemming: share of the answer's words, each as often as it occurs, that the output has."""
    target, source = (re.findall(r"[a-z0-9]+", text.lower()) for text in (answer, output))
    return sum(min(target.count(word), source.count(word)) for word in set(target)) / max(len(target), 1)


def calibrate(
    loaded: LoadedModel,
    sources: Sequence[PromptText] | None,
    out: Path,
    trials: int = 40,
    length: int = 1024,
    report: Callable[[dict[str, Any]], None] = lambda figures: None,
    settings: Settings | None = None,
    texts: Sequence[dict[str, Any]] = (),
) -> Path:
    """Measure and write the calibration file `out`. `trials` generated prompts of up to `length` tokens; `sources`: see
    `make_trials`; `texts`: the files they were read from, for the provenance.

    Raises ValueError with one sentence when the model answers no prompt, or its output projections are not found.
    """
    settings = settings or Settings()
    if length < SHORTEST:
        raise ValueError(f"length must be at least {SHORTEST} tokens: a needle needs something to hide in.")
    engine, shape, source = Engine(loaded), loaded.shape, list(sources or ())
    projections = output_projections(loaded)
    sums = {kind: torch.zeros(shape.layers, shape.q_heads, dtype=torch.float64) for kind in KINDS}
    request = counted = 0
    chance = 0.0
    for trial in make_trials(loaded, source, trials, length, settings):
        scores = HeadScores(shape.layers, shape.q_heads, trial.prompt.ids, trial.span, settings.top or len(trial.span))
        text = _answer(engine, trial, engine.read(trial.prompt, queries=settings.window), scores, settings)
        right = recall(trial.answer, text) > settings.recall
        request, counted = request + 1, counted + right
        chance += scores.chance * right
        for kind in KINDS if right else ():
            sums[kind] += scores.scores[kind]
        report({"measuring": "heads", "prompts": request, "answered": counted})
    if not counted:
        raise ValueError(
            f"'{loaded.name}' answered none of {request} needle prompts, so its heads cannot be scored: try a "
            f"smaller --length."
        )
    means = {kind: total / counted for kind, total in sums.items()}
    heads = [choose_heads(row.tolist(), shape.q_heads, settings.top_heads, "all") for row in means["srh"]]
    errors, finished = torch.zeros(shape.layers, dtype=torch.float64), 0
    for trial in make_trials(loaded, source, trials, length, settings):
        read = engine.read(trial.prompt, queries=settings.window)
        watcher = LayerErrors(
            projections, minimal_cache(read, heads, shape.group, settings), read.keys.shape[2], settings.epsilon
        )
        _answer(engine, trial, read, watcher, settings)
        errors, finished = errors + watcher.errors, finished + 1
        report({"measuring": "layer errors", "prompts": finished})
    figures: dict[str, Any] = {
        "scores": {kind: [[round(x, 6) for x in row.tolist()] for row in mean] for kind, mean in means.items()},
        "layer_error": [round(x, 6) for x in (errors / errors.sum()).tolist()],
        "layer_error_sum": [round(x, 4) for x in errors.tolist()],
        "srh_chance": round(chance / counted, 6),
        "asked": request,
        "answered": counted,
    }
    sentence = {"chat": template_of(loaded.tokenizer) is not None, "texts": list(texts)}
    how = {"trials": trials, "length": length, "sources": len(source), "settings": dataclasses.asdict(settings)}
    origin = provenance(loaded, **how, **sentence)
    return save(out, "compresskv", figures, origin)


def minimal_cache(
    read: ReadPrompt, heads: Sequence[Sequence[int]], group: int, settings: Settings
) -> list[torch.Tensor]:
    """Positions left per layer of those that prefill covered, when `minimal` prompt tokens are kept, chosen as a run
    chooses them. The last prompt token is one of them; step 0 feeds it."""
    n = read.keys.shape[2]
    inside = min(settings.window, n + 1) - 1
    values = []
    for layer, total in enumerate(heads):
        visited = window.received(*window.observed(read, layer, total, group, inside, read.peeked))
        scores = window.pooled(visited, settings.kernel, "avg").mean(0)
        count = max(0, min(settings.minimal, n + 1) - 1 - inside)
        start = scores.argsort(descending=True, stable=True)[:count].sort().values
        values.append(torch.cat([start, torch.arange(n - inside, n, device=start.device)]))
    return values


def _answer(
    engine: Engine, trial: Trial, read: ReadPrompt, watcher: HeadScores | LayerErrors, settings: Settings
) -> str:
    """What the model answers under full attention: its first line."""
    decode = engine.loaded.tokenizer.decode

    def ended(ids: list[int]) -> bool:
        return "\n" in decode(ids).lstrip()

    return str(decode(watch(engine, trial.prompt, read, settings.max_steps, watcher, ended), skip_special_tokens=True))
