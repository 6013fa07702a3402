"""Bytes that a cache's tensors hold, by layer and place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

DEPTH = 4
"""containers inside containers that are looked into"""


def tensors_in(thing: Any, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of an object: of lists and dicts, and of tensors that wrap others (a quantised tensor
    holds its numbers, scales and shifts)."""
    if isinstance(thing, torch.Tensor):
        flatten = getattr(thing, "__tensor_flatten__", None)
        if type(thing) is not torch.Tensor and flatten is not None:
            for name in flatten()[0]:
                yield from tensors_in(getattr(thing, name), depth)
        else:
            yield thing
    elif depth and isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value, depth - 1)
    elif depth and isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors_in(value, depth - 1)


def _rows(layer: Any, batch: int) -> int:
    """Return of how many sequences a cache's layer holds the keys: the batch's, where its first dimension is theirs;
    else 1."""
    keys = getattr(layer, "keys", None)
    return batch if isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.shape[0] == batch else 1


def count_bytes(cache: Any, layers: int, device: torch.device, batch: int) -> tuple[list[int], int]:
    """Return (bytes on the model's device of each layer, bytes elsewhere) of one sequence: the layer's, divided by the
    rows of the batch. A storage counts once and whole, whatever part of it a tensor shows."""
    held, elsewhere, counted = [0] * layers, 0, set()
    for index, layer in enumerate(getattr(cache, "layers", ())[:layers]):
        rows = _rows(layer, batch)
        for tensor in tensors_in(vars(layer)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() in counted or not storage.nbytes():
                continue
            counted.add(storage.data_ptr())
            if tensor.device == device:
                held[index] += storage.nbytes() // rows
            else:
                elsewhere += storage.nbytes() // rows
    return held, elsewhere


def layer_bytes(cache: Any, layer: int, device: torch.device, batch: int) -> int:
    """Return the bytes on the model's device of one layer and sequence."""
    layers = getattr(cache, "layers", ())
    if layer >= len(layers):
        return 0
    sizes = {}
    for tensor in tensors_in(vars(layers[layer])):
        if tensor.device == device:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values()) // _rows(layers[layer], batch)
