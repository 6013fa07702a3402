"""What the fault tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from warmprocess import WarmProcess


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmProcess]:
    """`kvlens` in processes of their own, which begin with everything imported."""
    with WarmProcess() as process:
        yield process
