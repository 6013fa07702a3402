"""CHESS's thresholds: how uncertain a model is while it answers with all of its cache (sec. 3.3, 5.1, Fig. 4)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvlens.demo.tasks import make_prompt
from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import LoadedModel
from kvlens.lab.calibrate.provenance import provenance, save
from kvlens.lab.calibrate.texts import sentences
from kvlens.methods.chess.trigger import page_uncertainty
from kvlens.methods.full import FullKV, FullParameters
from kvlens.methods.hooks import WindowLeave
from kvlens.methods.run_inputs import MemoryView, StepEnd
from kvlens.refusal import Refusal
from kvlens.text.chat import template_of
from kvlens.text.prompts import BadPrompt, PromptText, tokenize

PAGES = (8, 16, 32)
"""page sizes that thresholds are measured for: the spread of a page's entropies depends on how many there are"""
GENERATED = (("list", 12), ("list", 8), ("chain", 6), ("note", 1))
"""tasks of generated prompts, with how many items or hops (a note has neither): those with long answers"""
LENGTHS = (512, 1024, 2048)
QUESTIONS = (
    "Summarise the text above in detail.",
    "Explain the text above, point by point, to somebody who has not read it.",
    "Which terms does the text above use, and what does each of them mean?",
)
"""behind excerpts of real texts: questions with long answers"""
LONGEST_EXCERPT = 1024
FIRST_SEED = 9_000_000


def calibrate(
    loaded: LoadedModel,
    sources: list[PromptText],
    out: Path,
    max_new: int = 256,
    percentile: float = 99.0,
    report: Callable[[dict[str, Any]], None] = lambda figures: None,
    texts: Sequence[dict[str, Any]] = (),
) -> Path:
    """Greedy answers of at most `max_new` tokens under full KV, cut into pages as CHESS cuts them; the given percentile
    of the pages' entropy and varentropy, each by itself, goes to `out`.

    A page size of which fewer pages were filled than the percentile has parts (100 for the 99th) is left out. `texts`:
    the files that the prompts were made of, for the provenance.

    Raises ValueError when the percentile is none or too few pages were filled, BadPrompt for a text that does not fit
    the model.
    """
    if not 0 < percentile < 100:
        raise ValueError(f"the percentile must lie between 0 and 100, not {percentile:g}.")
    if not sources:
        raise ValueError("there is no text to calibrate on.")
    engine = Engine(loaded)
    answers: list[tuple[int, list[tuple[float, float]]]] = []
    for number, source in enumerate(sources):
        prompt = tokenize(source, loaded.tokenizer, loaded.max_positions, max_new)
        uncertainties: list[tuple[float, float]] = []
        engine.run(prompt, _watching(uncertainties), FullParameters(), options=Options(max_new=max_new))
        answers.append((len(prompt.ids) - 1, uncertainties))
        report({"prompts": number + 1, "of": len(sources), "tokens": sum(len(values) for _, values in answers)})
    least = math.ceil(100 / (100 - percentile))
    sizes = {page: _of_size(answers, page, percentile) for page in PAGES}
    filled = {str(page): figures for page, figures in sizes.items() if figures["pages"] >= least}
    if not filled:
        raise ValueError(
            f"the answers filled {sizes[PAGES[0]]['pages']} pages of {PAGES[0]} tokens, and percentile "
            f"{percentile:g} needs {least}: give "
            "more texts, texts that the model continues for longer, a larger --max-new or a lower --percentile."
        )
    origin = provenance(
        loaded,
        percentile=percentile,
        max_new=max_new,
        prompts=len(sources),
        tokens=sum(len(values) for _, values in answers),
        prompt_tokens=_ends([n for n, _ in answers]),
        tasks=sorted({s.task for s in sources if s.task}),
        seeds=_ends([s.seed for s in sources if s.seed is not None]),
        chat=template_of(loaded.tokenizer) is not None,
        texts=list(texts),
    )
    return save(out, "chess", {"pages": filled}, origin)


def _ends(values: list[int]) -> list[int]:
    """[smallest, largest]; [] of none."""
    return [min(values), max(values)] if values else []


def generated(loaded: LoadedModel, count: int, max_new: int) -> list[PromptText]:
    """`count` prompts of the demo language in the model's own tokens, those that leave room for `max_new`."""
    lengths = _lengths(loaded, max_new)
    prompts = []
    for index in range(count):
        task, size = GENERATED[index % len(GENERATED)]
        length = lengths[index // len(GENERATED) % len(lengths)]
        text = make_prompt(
            task,
            length,
            (index % 5) / 4,
            FIRST_SEED + index,
            lambda text: loaded.tokenizer.encode(text, add_special_tokens=False),
            hops=size,
            items=size,
        )
        prompts.append(PromptText(text.text, text.answer, text.needle, text.task, text.seed))
    return prompts


def excerpts(loaded: LoadedModel, texts: Sequence[PromptText], count: int, max_new: int) -> list[PromptText]:
    """`count` prompts that need a long answer: whole sentences of the texts in turn, from a place drawn by the seed,
    with one of QUESTIONS behind them. They have LENGTHS tokens in turn, up to LONGEST_EXCERPT and as far as they leave
    room for `max_new`.

    Raises ValueError for a text without sentences enough, BadPrompt for a model that is too small.
    """
    lengths = [length for length in _lengths(loaded, max_new) if length <= LONGEST_EXCERPT]
    return [
        excerpt(
            loaded.tokenizer,
            texts[index % len(texts)].text,
            lengths[index // len(texts) % len(lengths)],
            FIRST_SEED + index,
            QUESTIONS[index % len(QUESTIONS)],
        )
        for index in range(count)
    ]


def excerpt(tokenizer: Any, text: str, length: int, seed: int, question: str) -> PromptText:
    """Whole sentences of a text from a place drawn by the seed, begun again at its end, with the question behind them:
    `length` tokens at most, without what a chat form adds. Raises ValueError for a text without sentences enough."""
    parts = sentences(text)
    sizes = [len(tokenizer.encode(f" {part}", add_special_tokens=False)) for part in parts]
    if sum(sizes) < length:
        raise Refusal(
            f"a text has {sum(sizes):,} tokens, too few for an excerpt of {length:,}: give a longer one.",
            code="text_too_short",
            tokens=sum(sizes),
        )
    start = random.Random(f"excerpt/{seed}").randrange(len(parts))
    parts_taken, room = [], length - len(tokenizer.encode(QUESTIONS[0], add_special_tokens=False))
    for offset in range(len(parts)):
        part = (start + offset) % len(parts)
        if sizes[part] > room:
            break
        parts_taken.append(parts[part])
        room -= sizes[part]
    return PromptText(f"{' '.join(parts_taken)}\n\n{question}", task="excerpt", seed=seed)


def _lengths(loaded: LoadedModel, max_new: int) -> list[int]:
    lengths = [length for length in LENGTHS if length + max_new <= loaded.max_positions]
    if not lengths:
        raise BadPrompt(
            f"this model takes {loaded.max_positions} tokens, too few for a prompt of {LENGTHS[0]} and "
            f"{max_new} new ones.",
            code="model_too_short",
        )
    return lengths


def _watching(uncertainties: list[tuple[float, float]]) -> type[FullKV]:
    """Full KV that notes what CHESS would be told of each step: (entropy, varentropy) of the distribution it
    produced."""

    class Watch(FullKV):
        def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
            uncertainties.append((end.next_entropy, end.next_varentropy))
            return None

    return Watch


def pages_of(answer: tuple[int, list[tuple[float, float]]], page: int) -> list[list[tuple[float, float]]]:
    """An answer (position of its first distribution, values) -> the pages that lie in it whole, at the method's page
    boundaries."""
    start, values = answer
    first_start = -start % page
    return [values[start : start + page] for start in range(first_start, len(values) - page + 1, page)]


def _of_size(answers: list[tuple[int, list[tuple[float, float]]]], page: int, percentile: float) -> dict[str, Any]:
    pages = [values for answer in answers for values in pages_of(answer, page)]
    if not pages:
        return {"pages": 0}
    figures_by_page: dict[str, list[float]] = {
        "entropy_nats": [page_uncertainty(values, "page")[0] for values in pages]
    }
    for kind in ("page", "token"):
        figures_by_page[f"varentropy_{kind}_nats2"] = [page_uncertainty(values, kind)[1] for values in pages]
    figures: dict[str, Any] = {name: quantile(values, percentile) for name, values in figures_by_page.items()}
    above = [
        (e > figures["entropy_nats"], v > figures["varentropy_page_nats2"])
        for e, v in zip(figures_by_page["entropy_nats"], figures_by_page["varentropy_page_nats2"], strict=True)
    ]
    return {"pages": len(pages), **figures, "above_both": sum(map(all, above)), "above_one": sum(map(any, above))}


def quantile(values: list[float], percentile: float) -> float:
    """Linear interpolation between the two nearest of the sorted values."""
    ordered = sorted(values)
    position = percentile / 100 * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
