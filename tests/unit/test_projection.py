"""Principal components of vectors, against NumPy's singular values."""

from __future__ import annotations

import numpy as np
import pytest

from kvlens.app.figures.projection import pca


@pytest.mark.parametrize("shape", [(40, 6), (5, 12), (2, 3), (3, 1)])
def test_components_are_those_of_the_singular_values(shape: tuple[int, int]) -> None:
    vectors = np.random.default_rng(0).normal(size=shape) * np.arange(1, shape[1] + 1)
    points, shares = pca(vectors)
    u, size, _ = np.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    count = min(2, len(size))
    assert np.abs(points[:, :count]) == pytest.approx(np.abs(u[:, :count] * size[:count]), abs=1e-9)
    assert shares[:count] == pytest.approx((size**2 / (size**2).sum())[:count])


def test_vectors_without_variance_lie_on_one_point() -> None:
    points, shares = pca(np.ones((4, 3)))
    assert not points.any()
    assert not shares.any()
