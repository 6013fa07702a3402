"""The products of a decode step at the 8B shape, one vector and several, by every tile worth measuring and by the
library: what the step takes from then on is the fastest here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kvlens.lab.gpu.ceilings import COPY
from kvlens.lab.gpu.device import Step
from kvlens.lab.gpu.failures import sentence
from kvlens.lab.gpu.kernels.matvec import MEASURED, ONE, SEVERAL, Around, Tile, matvec, matvec_triton
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.results.gpu import KernelRow, ceiling, rows

SPREAD = 256 << 20
"""bytes that the copies of a matrix come to, above all caches"""
KERNEL, LIBRARY_ALONE = "mat-vec", "mat-vec by PyTorch"
SMALLER = "free the device's memory; this part takes 3 GB"
VECTORS = (1, 8)


@dataclass(frozen=True)
class Product:
    """A product of a layer, or the last one."""

    name: str
    outputs: int
    inputs: int
    norm: bool = False
    gated: bool = False
    add: bool = False

    @property
    def bytes(self) -> int:
        """Of the matrix, two bytes a number."""
        return 2 * self.outputs * self.inputs * (2 if self.gated else 1)


def products(bench: Bench) -> tuple[Product, ...]:
    """Return the products of the model's step."""
    model, kv = bench.model, bench.model.kv
    inner = kv.q_heads * kv.head_dim
    return (
        Product(
            "norm, queries, keys and values", (kv.q_heads + 2 * kv.kv_heads) * kv.head_dim, model.hidden, norm=True
        ),
        Product("output, residual", model.hidden, inner, add=True),
        Product("norm, gate and up, SiLU", model.inner, model.hidden, norm=True, gated=True),
        Product("down, residual", model.hidden, model.inner, add=True),
        Product("norm, vocabulary", model.vocabulary, model.hidden, norm=True),
    )


@torch.inference_mode()
def measure(bench: Bench) -> Iterator[KernelRow]:
    """The best tile of a shape is adopted as soon as it is known."""
    for vectors in VECTORS:
        for product in products(bench):
            tiles = (SEVERAL if vectors > 1 else ONE)[: 2 if bench.dry else None]
            measured = [_row(bench, product, vectors, tile) for tile in tiles]
            yield from measured
            best = min((row for row in measured if row.seconds), key=lambda row: row.seconds or 0.0, default=None)
            if best is not None:
                MEASURED[_key(product, vectors)] = tiles[measured.index(best)]
            yield _row(bench, product, vectors, None)


def adopt(result: dict[str, Any]) -> None:
    """Take over the fastest tiles that an earlier call has measured on this device."""
    best: dict[tuple[int, int, bool, bool], tuple[float, Tile]] = {}
    for row in rows(result, "kernel"):
        if row["kernel"] != KERNEL or row["seconds"] is None:
            continue
        shape, tile = (part.split(" x ") for part in row["setting"].split("; ")[1:])
        outputs, inputs, vectors, gated = (int(value) for value in shape)
        key = outputs, inputs, vectors > 1, bool(gated)
        if key not in best or row["seconds"] < best[key][0]:
            best[key] = row["seconds"], Tile(*(int(value) for value in tile))
    MEASURED.update({key: tile for key, (_, tile) in best.items()})


def _key(product: Product, vectors: int) -> tuple[int, int, bool, bool]:
    return product.outputs, product.inputs, vectors > 1, product.gated


def _row(bench: Bench, product: Product, vectors: int, tile: Tile | None) -> KernelRow:
    """tile: None: the product alone by the library, as the modules of transformers issue it."""
    shape = f"{product.outputs} x {product.inputs} x {vectors} x {int(product.gated)}"
    setting = f"{product.name}; {shape}" + ("" if tile is None else f"; {' x '.join(map(str, tile))}")
    name = LIBRARY_ALONE if tile is None else KERNEL
    copies = 2 if bench.dry else max(2, min(16, math.ceil(SPREAD / product.bytes)))
    try:
        steps = [_step(bench, product, vectors, tile) for _ in range(copies)]
        seconds = bench.device.per_call(steps, 3 if bench.dry else 20)
    except Exception as problem:
        if not bench.device.alive():
            raise
        return KernelRow(name, setting, None, product.bytes, None, COPY, None, None, sentence(problem, SMALLER)[0])
    finally:
        bench.device.release()
    rate, best = product.bytes / seconds, ceiling(bench.result, COPY)
    return KernelRow(name, setting, seconds, product.bytes, rate, COPY, rate / best if best else None, None)


def _step(bench: Bench, product: Product, vectors: int, tile: Tile | None) -> Step:
    normal = bench.device.normal
    x = normal(vectors, product.inputs)
    matrix = normal(product.outputs * (2 if product.gated else 1), product.inputs, scale=product.inputs**-0.5)
    norm = normal(product.inputs) if product.norm else None
    add = normal(vectors, product.outputs) if product.add else None
    around = Around(norm, 1e-5, product.gated, add)
    if tile is None:
        return partial(F.linear, x, matrix)
    return partial(matvec, x, matrix, around) if bench.dry else partial(matvec_triton, x, matrix, around, tile)


PART = Part("matvecs", measure, ("matvec_times.py", "ceilings.py", "failures.py"), SMALLER)
