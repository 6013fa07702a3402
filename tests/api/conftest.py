"""A folder of runs for the API, and one run of the toy that loses its answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from apirun import BUDGET, METHOD, NEW

import kvlens


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that calls store in where they name none."""
    folder = tmp_path_factory.mktemp("api") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLENS_RUNS", str(folder))
        yield folder


@pytest.fixture(scope="module")
def lost(runs: Path) -> kvlens.Run:
    """A run that lost its answer, compared with full KV."""
    return kvlens.run(kvlens.sample("demo"), METHOD, BUDGET, model="demo", max_new=NEW, progress=False)
