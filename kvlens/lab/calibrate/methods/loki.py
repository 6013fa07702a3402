"""Loki's offline figures for a model: the principal components of each KV head's keys, on generated needle prompts or
given texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvlens.engine.engine import Engine
from kvlens.engine.models import LoadedModel
from kvlens.lab.calibrate.methods.qfilters import read_prompts
from kvlens.lab.calibrate.provenance import provenance
from kvlens.text.prompts import PromptText

KEPT_SHARE = 0.5
"""of a head's axes that the file holds, the main ones"""


def calibrate(
    loaded: LoadedModel,
    sources: Sequence[PromptText] | None,
    out: Path,
    prompts: int = 16,
    length: int = 1024,
    report: Callable[[dict[str, Any]], None] = lambda figures: None,
    texts: Sequence[dict[str, Any]] = (),
) -> Path:
    """Read the prompts and write the axes to `out`, a .safetensors file, with a .json file of their origin beside it.
    prompts: generated ones of `length` tokens at most, where there are no sources; texts: the files that sources were
    read from, for the provenance. Raises ValueError for another kind of file."""
    if out.suffix != ".safetensors":
        raise ValueError(f"'{out.name}' holds axes: give it a name that ends with .safetensors.")
    shape, engine = loaded.shape, Engine(loaded)
    squares = torch.zeros(shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim, dtype=torch.float64)
    sums, count = torch.zeros(shape.layers, shape.kv_heads, shape.head_dim, dtype=torch.float64), 0
    for number, prompt in enumerate(read_prompts(loaded, sources, prompts, length)):
        keys = engine.read(prompt, queries=1).keys.double().cpu()
        squares += keys.mT @ keys
        sums += keys.sum(2)
        count += keys.shape[2]
        report({"prompts": number + 1, "keys": count})
    axes, explained = components(squares, sums, count)
    width = max(1, int(shape.head_dim * KEPT_SHARE))
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({"axes": axes[..., :width].to(torch.float16).contiguous()}, out)
    origin = provenance(
        loaded,
        method="loki",
        prompts=prompts,
        length=length,
        sources=len(sources or ()),
        texts=list(texts),
        keys=count,
        axes=width,
        variance_of_a_quarter=round(float(explained[..., : max(1, shape.head_dim // 4)].sum(-1).mean()), 4),
    )
    out.with_suffix(".json").write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
    return out


def components(squares: torch.Tensor, sums: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the principal components [L, H_kv, D, D], main ones first, and their shares of the variance [L, H_kv, D].
    squares [L, H_kv, D, D] and sums [L, H_kv, D] over `count` keys."""
    mean = sums / count
    spread, axes = torch.linalg.eigh(squares / count - mean[..., None] * mean[..., None, :])
    spread = spread.clamp(min=0).flip(-1)
    return axes.flip(-1), spread / spread.sum(-1, keepdim=True).clamp(min=1e-20)
