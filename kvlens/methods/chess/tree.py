"""CHESS's hierarchy: page vectors, the centroids above them, their scores in one product, and the top-down cascade
(sec. 3, Alg. 1).

A level's members are consecutive, so a level is a half-open range of unit numbers. Shapes: F = layers * KV heads * head
size numbers per vector; keys [L, H_kv, m, D].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LEVELS = ("grid", "chunk", "page")


def page_vectors(keys: torch.Tensor, page: int, scale: str = "plain") -> torch.Tensor:
    """keys of whole pages [L, H_kv, m * page, D] -> means [m, F] in float32, flattened over layers, KV heads and D (eq.
    1)."""
    means = keys.float().unflatten(2, (-1, page)).mean(3)
    if scale == "layer":
        means = means / means.square().sum((1, 3), keepdim=True).sqrt().clamp(min=1e-12)
    return means.permute(2, 0, 1, 3).flatten(1)


@dataclass(frozen=True)
class Cascade:
    """One reconstruction's outcome. Per level, in the order of LEVELS: the first unit, the scores [u] and which were
    kept [u]."""

    first: tuple[int, ...]
    scores: tuple[torch.Tensor, ...]
    kept: tuple[torch.Tensor, ...]


class Tree:
    """Vectors of all units in one tensor [grids + chunks + pages, F], as one matrix product wants them (sec. 4.2)."""

    def __init__(
        self,
        grids: int,
        chunks: int,
        pages: int,
        features: int,
        chunk_pages: int,
        grid_chunks: int,
        first_page: int,
        dtype: torch.dtype,
        device: torch.device,
        printed: bool = False,
    ) -> None:
        """first_page: of the pages in the hierarchy; printed: centroids of units that are not full as in eq. 2."""
        self.chunk_pages, self.grid_chunks, self.printed = chunk_pages, grid_chunks, printed
        self.first, self.stop = first_page, first_page
        """pages in the hierarchy"""
        self.vectors = torch.zeros(grids + chunks + pages, features, dtype=dtype, device=device)
        self._grids, self._chunks, self._pages = self.vectors.split([grids, chunks, pages])

    def put(self, page: int, vectors: torch.Tensor) -> None:
        """Vectors [m, F] of the pages from `page` on. They join the hierarchy later, by `join`."""
        self._pages[page : page + len(vectors)] = vectors.to(self.vectors.dtype)

    def anchor(self, start: int, stop: int, tail: torch.Tensor | None = None) -> torch.Tensor:
        """Mean of the vectors of pages [start, stop) and, if given, of a `tail` [1, F] (eq. 3) -> [F], float32."""
        rows = self._pages[start:stop].float()
        return (rows if tail is None else torch.cat([rows, tail])).mean(0)

    def join(self, stop: int) -> None:
        """Pages up to `stop` are in the hierarchy: the centroids above them become means of their members (eq. 2), of
        those they have so far unless as `printed`."""
        if stop <= self.stop:
            return
        previous_stop, self.stop = self.stop, stop
        chunks = range(previous_stop // self.chunk_pages, (stop - 1) // self.chunk_pages + 1)
        for chunk in chunks:
            members = slice(max(self.first, chunk * self.chunk_pages), min(stop, (chunk + 1) * self.chunk_pages))
            self._chunks[chunk] = self._centroid(self._pages[members], self.chunk_pages)
        (_, _), (first_chunk, stop_chunk), _ = self.ranges()
        for grid in range(chunks.start // self.grid_chunks, (chunks.stop - 1) // self.grid_chunks + 1):
            members = slice(max(first_chunk, grid * self.grid_chunks), min(stop_chunk, (grid + 1) * self.grid_chunks))
            self._grids[grid] = self._centroid(self._chunks[members], self.grid_chunks)

    def _centroid(self, members: torch.Tensor, full: int) -> torch.Tensor:
        """members [m, F] of a unit that has room for `full` -> [F]."""
        mean = members.float().sum(0) / (full if self.printed else len(members))
        return mean.to(self.vectors.dtype)

    def ranges(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """[first, stop) of the grids, chunks and pages that have members."""
        pages = (self.first, self.stop)
        chunks = _parents(pages, self.chunk_pages)
        return _parents(chunks, self.grid_chunks), chunks, pages

    def select(
        self, anchor: torch.Tensor, ratios: tuple[float, float, float], quantile: str, pages: int | None = None
    ) -> Cascade:
        """Scores of all units in one product (eq. 4), then grids, chunks under kept grids, pages under kept chunks.
        `pages`: how many pages instead of the last ratio."""
        ranges = self.ranges()
        every = (self.vectors.float() @ anchor).split([len(self._grids), len(self._chunks), len(self._pages)])
        scores = tuple(level[start:stop] for level, (start, stop) in zip(every, ranges, strict=True))
        keep = _literal if quantile == "paper_literal" else _active
        active, selected = torch.ones_like(scores[0], dtype=torch.bool), []
        for level, width in enumerate((self.grid_chunks, self.chunk_pages, 0)):
            selected.append(keep(scores[level], active, ratios[level], pages if level == 2 else None))
            if width:
                (above, _), (start, stop) = ranges[level], ranges[level + 1]
                active = selected[-1][torch.arange(start, stop, device=anchor.device) // width - above]
        return Cascade(tuple(start for start, _ in ranges), scores, tuple(selected))


def _parents(units: tuple[int, int], width: int) -> tuple[int, int]:
    start, stop = units
    return (start // width, -(-stop // width)) if stop > start else (start // width, start // width)


def _active(scores: torch.Tensor, active: torch.Tensor, ratio: float, count: int | None) -> torch.Tensor:
    """The best ceil(ratio * active), or `count`, of the active units; at least one, ties to the lower number. scores,
    active [u]."""
    candidates = int(active.sum())
    most = max(1, math.ceil(ratio * candidates - 1e-9)) if count is None else count
    order = scores.masked_fill(~active, float("-inf")).argsort(descending=True, stable=True)
    selected = torch.zeros_like(active)
    selected[order[: min(most, candidates)]] = True
    return selected


def _literal(scores: torch.Tensor, active: torch.Tensor, ratio: float, count: int | None) -> torch.Tensor:
    """Algorithm 1 as printed: scores of inactive units become zero and count in the quantile; equal scores pass
    together."""
    if not len(scores):
        return torch.zeros_like(active)
    threshold = torch.quantile(scores * active, 1 - ratio)
    return (scores >= threshold) & active
