"""k-means whose outcome depends on keys and seed alone, as tensor operations.

Shapes: B sets, n vectors, D numbers of each, k clusters.
"""

from __future__ import annotations

import torch


def nearest(x: torch.Tensor, centroids: torch.Tensor, cosine: bool) -> torch.Tensor:
    """Which centroid each vector is nearest to, by angle or by distance: x [B, n, D], centroids [B, k, D], float32 ->
    int64 [B, n]."""
    if cosine:
        return (x @ torch.nn.functional.normalize(centroids, dim=-1).transpose(-1, -2)).argmax(-1)
    return (2 * x @ centroids.transpose(-1, -2) - centroids.square().sum(-1)[:, None]).argmax(-1)


def kmeans(x: torch.Tensor, k: int, rounds: int, seed: int, cosine: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, n, D], k <= n -> centroids float32 [B, k, D], the means of their clusters, and labels int64 [B, n] by these
    means. The first centroids are vectors drawn by the seed, the same places in every set; a cluster that has become
    empty keeps its centroid."""
    wide = x.float()
    drawn = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))[:k]
    centroids = wide[:, drawn.to(x.device)]
    labels = nearest(wide, centroids, cosine)
    for _ in range(rounds):
        owner = wide.new_zeros(*labels.shape, k).scatter_(2, labels[..., None], 1.0)
        size = owner.sum(1)[..., None]  # by products, since sums by index have no order on a device
        centroids = torch.where(size > 0, owner.transpose(-1, -2) @ wide / size.clamp(min=1), centroids)
        previous, labels = labels, nearest(wide, centroids, cosine)
        if torch.equal(previous, labels):
            break  # further rounds would change nothing
    return centroids, labels
