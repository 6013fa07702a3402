"""The output projection W_O of every layer: to look behind it, and to switch single query heads off before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvlens.engine.models import LoadedModel

NAMES = ("o_proj", "out_proj", "c_proj", "dense")
"""what the supported families call it inside their attention modules"""


def output_projections(loaded: LoadedModel) -> list[torch.nn.Module]:
    """W_O by layer. Raises ValueError when the model keeps it under another name."""
    modules_by_key: dict[int, torch.nn.Module] = {}
    for module in loaded.model.modules():
        layer = getattr(module, "layer_idx", None)
        names = [name for name in NAMES if isinstance(getattr(module, name, None), torch.nn.Module)]
        if isinstance(layer, int) and names:
            modules_by_key[layer] = getattr(module, names[0])
    if sorted(modules_by_key) != list(range(loaded.shape.layers)):
        raise ValueError(
            f"the attention output projections of '{loaded.name}' were not found: it cannot be calibrated."
        )
    return [modules_by_key[layer] for layer in range(loaded.shape.layers)]


def projected(projection: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """W_O x without a bias: x [Hq * D] -> [hidden]."""
    rows = torch.stack([x, torch.zeros_like(x)])
    out = projection(rows)
    return out[0] - out[1]


@contextmanager
def heads_off(loaded: LoadedModel, heads: Iterable[tuple[int, int]]) -> Iterator[None]:
    """Inside this context the attention output of the query heads (layer, head) is zero before W_O."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)
    projections, size = output_projections(loaded), loaded.shape.head_dim

    def zero(off: list[int]) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x = inputs[0].clone()
            x.unflatten(-1, (-1, size))[..., off, :] = 0
            return (x, *inputs[1:])

        return hook

    handles = [projections[layer].register_forward_pre_hook(zero(off)) for layer, off in by_layer.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
