"""k-means whose outcome depends on keys and seed alone, as tensor operations.

Shapes: B sets, n vectors, D numbers of each, k clusters.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch


def nearest(x: torch.Tensor, centroids: torch.Tensor, cosine: bool) -> torch.Tensor:
    """Return the centroid that each vector is nearest to, by angle or by distance: x [B, n, D], centroids [B, k, D],
    float32 -> int64 [B, n]. The cost is n * k distances of each set."""
    if cosine:
        return (x @ torch.nn.functional.normalize(centroids, dim=-1).transpose(-1, -2)).max(-1).indices
    return (2 * x @ centroids.transpose(-1, -2) - centroids.square().sum(-1)[:, None]).max(-1).indices


def kmeans(
    x: torch.Tensor, k: int, rounds: int, seed: int, cosine: bool, sample: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, n, D], k <= n -> centroids float32 [B, k, D], the means of their clusters, and labels int64 [B, n] by these
    means. The first centroids are vectors drawn by the seed, the same places in every set; a cluster that has become
    empty keeps its centroid. sample: the centroids are the means of so many drawn vectors, at least k, where there are
    more; 0: of all."""
    wide, n = x.float(), x.shape[1]
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(x.device)
    centroids = wide[:, drawn[:k]]
    sample_size = max(sample, k) if sample else n
    if sample_size < n:
        centroids, _ = _rounds(wide[:, drawn[:sample_size].sort().values], centroids, rounds, cosine)
        return centroids, nearest(wide, centroids, cosine)
    return _rounds(wide, centroids, rounds, cosine)


def split(count: int, parts: int) -> list[int]:
    """Return `parts` numbers that add up to `count` and differ by 1 at most."""
    edges = [count * number // parts for number in range(parts + 1)]
    return [end - start for start, end in pairwise(edges)]


def blocks(n: int, most: int) -> list[slice]:
    """Return where n vectors are split into blocks of nearly equal length, at most `most` each; 0: one block."""
    edges = [0, *accumulate(split(n, -(-n // most) if most else 1))]
    return [slice(start, end) for start, end in pairwise(edges)]


def _rounds(x: torch.Tensor, centroids: torch.Tensor, rounds: int, cosine: bool) -> tuple[torch.Tensor, torch.Tensor]:
    labels = nearest(x, centroids, cosine)
    for _ in range(rounds):
        sums, size = _cluster_sums(x, labels, centroids.shape[1])
        centroids = torch.where(size > 0, sums / size.clamp(min=1), centroids)
        previous, labels = labels, nearest(x, centroids, cosine)
        if torch.equal(previous, labels):
            break  # further rounds would change nothing
    return centroids, labels


def _cluster_sums(x: torch.Tensor, labels: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of each cluster's vectors [B, k, D] and how many they are [B, k, 1]."""
    if x.device.type != "cpu":  # by products, since sums by index have no order on a device
        owner = x.new_zeros(*labels.shape, k).scatter_(2, labels[..., None], 1.0)
        return owner.transpose(-1, -2) @ x, owner.sum(1)[..., None]
    sets = len(x)
    rows = (labels + torch.arange(sets)[:, None] * k).flatten()
    sums = x.new_zeros(sets * k, x.shape[2]).index_add_(0, rows, x.flatten(0, 1))
    return sums.view(sets, k, -1), torch.bincount(rows, minlength=sets * k).view(sets, k, 1).to(x.dtype)
