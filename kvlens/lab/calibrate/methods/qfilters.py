"""Q-Filters' offline figures for a model: the main direction of each head's queries, on generated needle prompts or
given texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvlens.engine.engine import Engine
from kvlens.engine.models import LoadedModel
from kvlens.lab.calibrate.methods.compresskv import Settings, make_trials
from kvlens.lab.calibrate.provenance import provenance, save
from kvlens.text.prompts import Prompt, PromptText, tokenize

DIGITS = 5
"""decimals of a filter's numbers in the file"""


def calibrate(
    loaded: LoadedModel,
    sources: Sequence[PromptText] | None,
    out: Path,
    prompts: int = 16,
    length: int = 1024,
    report: Callable[[dict[str, Any]], None] = lambda figures: None,
    texts: Sequence[dict[str, Any]] = (),
) -> Path:
    """Read the prompts and write the filters to `out`. prompts: generated ones of `length` tokens at most, where there
    are no sources; texts: the files that sources were read from, for the provenance."""
    shape, engine = loaded.shape, Engine(loaded)
    squares = torch.zeros(shape.layers, shape.q_heads, shape.head_dim, shape.head_dim, dtype=torch.float64)
    sums = torch.zeros(shape.layers, shape.q_heads, shape.head_dim, dtype=torch.float64)
    count = 0
    for number, prompt in enumerate(read_prompts(loaded, sources, prompts, length)):
        queries = engine.read(prompt, queries=len(prompt.ids)).last_queries.double().cpu()
        squares += queries.mT @ queries
        sums += queries.sum(2)
        count += queries.shape[2]
        report({"prompts": number + 1, "queries": count})
    figures = {"filters": filters(squares, sums, shape.group), "queries": count}
    origin = provenance(loaded, prompts=prompts, length=length, sources=len(sources or ()), texts=list(texts))
    return save(out, "qfilters", figures, origin)


def read_prompts(loaded: LoadedModel, sources: Sequence[PromptText] | None, prompts: int, length: int) -> list[Prompt]:
    """Return the tokenised sources, or generated needle prompts."""
    if sources:
        return [tokenize(source, loaded.tokenizer, loaded.max_positions, 1) for source in sources]
    return [trial.prompt for trial in make_trials(loaded, (), prompts, length, Settings())]


def filters(squares: torch.Tensor, sums: torch.Tensor, group: int) -> list[list[list[float]]]:
    """Return the directions [L][H_kv][D]: of each query head the first eigenvector of the sum of squares
    [L, Hq, D, D], turned so that the sum of queries [L, Hq, D] is on its positive side; averaged over each group."""
    main = torch.linalg.eigh(squares).eigenvectors[..., -1]
    side = (main * sums).sum(-1, keepdim=True)
    directions = torch.where(side < 0, -main, main).unflatten(1, (-1, group)).mean(2)
    return [[[round(x, DIGITS) for x in head] for head in layer] for layer in directions.tolist()]
