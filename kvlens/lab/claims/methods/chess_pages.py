"""CHESS's first selection: how the pages with the asked facts rank in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvlens.engine.engine import Options
from kvlens.methods.chess.method import Chess
from kvlens.methods.chess.tree import page_vectors

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine
    from kvlens.engine.prefill import ReadPrompt
    from kvlens.text.prompts import Prompt

Ranked = dict[str, float]
"""of the asked pages that only a selection attends: `rank`, their mean rank among such pages (0 best, 1 last, 0.5 by
chance); `kept`, the share of them that the hierarchy kept; `flat`, the share that as many best pages without it would
have kept; `chance`; `spent`, the share of the selection that went to pages attended anyway"""
Ranges = Sequence[tuple[int, int]]
"""character ranges of the asked facts"""


def watching(keep: Callable[[str, torch.Tensor], Any]) -> type[Chess]:
    """Return CHESS with a journal that is handed to `keep` (name, values) in place of a recorder."""

    class Watch(Chess):
        def note(self, name: str, values: torch.Tensor, layer: int | None = None, kv_head: int | None = None) -> None:
            keep(name, values)

    return Watch


def first_selection(
    engine: Engine, prompt: Prompt, read: ReadPrompt, overrides: Mapping[str, Any], preset: str | None = None
) -> tuple[dict[str, torch.Tensor], int]:
    """Return (the first values of every journal name, tokens of a page). preset: None: the model's usual one, `fit`
    where its numbers do not fit. Raises ValueError with one sentence for a model without thresholds."""
    from kvlens.lab.bench.trials import chosen
    from kvlens.runs.request import default_preset

    row = {"preset": preset or default_preset(Chess.name, engine.loaded.name), "overrides": overrides}
    options, values = Options(max_new=1), dict[str, torch.Tensor]()
    params = chosen(engine, prompt, Chess, row, None, options).params
    engine.run(prompt, watching(values.setdefault), params, None, options, read=read)
    return values, params.page


def asked_pages(prompt: Prompt, needle: Ranges, page: int) -> list[int]:
    """Return the pages that hold tokens of the asked facts."""
    return sorted(
        {
            token // page
            for token, place in enumerate(prompt.offsets)
            if place and any(place[0] < stop and place[1] > start for start, stop in needle)
        }
    )


def rank_asked(prompt: Prompt, needle: Ranges, selection: Mapping[str, torch.Tensor], page: int) -> list[Ranked]:
    """Return one row, or none if the facts lie in pages that are attended anyway. selection: a first selection."""
    score = selection["page_score"].double().numpy()
    sinks, window, _ = (int(number) for number in selection["safe_pages"])
    candidates = np.flatnonzero(~np.isnan(score))
    order = candidates[np.argsort(-score[candidates], kind="stable")].tolist()
    choice = [number for number in order if sinks <= number < window]
    answer_pages = [number for number in asked_pages(prompt, needle, page) if number in choice]
    if not answer_pages:
        return []
    selected = set(np.flatnonzero(selection["page_kept"].numpy()).tolist())
    best = set(order[: len(selected)])
    rank = float(np.mean([choice.index(number) for number in answer_pages])) / max(1, len(choice) - 1)
    share, flat = (len(pages.intersection(answer_pages)) / len(answer_pages) for pages in (selected, best))
    spent = len(selected - set(choice)) / len(selected)
    return [{"rank": rank, "kept": share, "flat": flat, "chance": len(selected) / len(order), "spent": spent}]


def rank_by_parts(
    prompt: Prompt, needle: Ranges, read: ReadPrompt, selection: Mapping[str, torch.Tensor], page: int
) -> list[list[Ranked]]:
    """Return the rows of `rank_asked` by the two parts of the score: with m the mean page vector, v . anchor = v . m +
    v . (anchor - m), and each part ranks by itself; as many best pages as the hierarchy kept count as kept."""
    sinks, window, stop = (int(number) for number in selection["safe_pages"])
    vectors = page_vectors(read.keys[:, :, : stop * page], page)
    pages, anchor = vectors[sinks:window], vectors[window:stop].mean(0)
    common, ranked = pages.mean(0), []
    for direction in (common, anchor - common):
        score = torch.cat([torch.full((sinks,), torch.nan), pages @ direction])
        rows = rank_asked(prompt, needle, {**selection, "page_score": score}, page)
        ranked.append([{**row, "kept": row["flat"]} for row in rows])
    return ranked
