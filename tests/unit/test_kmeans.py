"""What k-means costs as a prompt grows, in distances that it computes, and what it comes to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlens.methods import get, make_parameters
from kvlens.methods.families import kmeans
from kvlens.methods.families.kmeans import blocks
from kvlens.methods.families.kmeans import kmeans as cluster

HEADS, DIM = 2, 8


def distances(monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, count: int, **values: Any) -> int:
    """Return the distances that a method computes to index so many prompt tokens of one layer."""
    counted = [0]
    nearest = kmeans.nearest

    def count_distances(x: torch.Tensor, centroids: torch.Tensor, cosine: bool) -> torch.Tensor:
        counted[0] += x.shape[0] * x.shape[1] * centroids.shape[1]
        return nearest(x, centroids, cosine)

    monkeypatch.setattr(kmeans, "nearest", count_distances)
    method: Any = SimpleNamespace()
    kind: Any = get(name)
    method.params = make_parameters(kind, None, values)
    method.context = SimpleNamespace(seed=0)
    method._known, method._pages, method._clusters, method._first = False, 0, 0, count
    size = (1, HEADS, count, DIM) if name == "clusterkv" else (1, HEADS, 2, count, DIM // 2)
    method._centroids = torch.zeros(size)
    keys = torch.randn(1, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(1))
    entries = kind.index(method, keys)
    assert entries.shape[:3] == (1, HEADS, tokens)
    assert int(entries.max()) < count
    monkeypatch.setattr(kmeans, "nearest", nearest)
    return counted[0]


def test_four_times_the_prompt_costs_clusterkv_four_times_the_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"cluster": 8, "block": 128, "rounds": 3}
    short, long = (distances(monkeypatch, "clusterkv", n, n // 8, **values) for n in (512, 2048))
    assert long <= 4.5 * short
    whole = distances(monkeypatch, "clusterkv", 2048, 256, **(values | {"block": 0}))
    assert whole > 8 * long


def test_centroids_of_a_long_prompt_come_from_a_draw_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"sample": 128, "rounds": 3, "bits": 4}
    short, long = (distances(monkeypatch, "pqcache", n, 16, **values) for n in (512, 2048))
    assert long <= 4.5 * short
    assert distances(monkeypatch, "pqcache", 2048, 16, **(values | {"sample": 0})) > 2 * long


def test_a_prompt_within_one_block_or_sample_is_clustered_as_a_whole() -> None:
    x = torch.randn(HEADS, 90, DIM, generator=torch.Generator().manual_seed(2))
    whole, drawn = (cluster(x, 5, 4, 0, cosine=False, sample=sample) for sample in (0, 90))
    assert all(torch.equal(*pair) for pair in zip(whole, drawn, strict=True))
    assert blocks(90, 90) == blocks(90, 0) == [slice(0, 90)]


@pytest.mark.parametrize(("n", "most"), [(91, 30), (4097, 4096), (7, 3)])
def test_blocks_cover_the_prompt_and_are_nearly_equal(n: int, most: int) -> None:
    parts = blocks(n, most)
    lengths = [part.stop - part.start for part in parts]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert sum(lengths) == n
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1


def test_centroids_are_the_means_of_their_clusters() -> None:
    x = torch.randn(HEADS, 200, DIM, generator=torch.Generator().manual_seed(3))
    centroids, labels = cluster(x, 6, 100, 0, cosine=False)
    for head in range(HEADS):
        for place in range(6):
            torch.testing.assert_close(centroids[head, place], x[head][labels[head] == place].mean(0))
