"""How long a torch thread spins while it waits for the others: said before torch is loaded, unless the user said it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAID = "import sys, kvlens.cli.main, os; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"


@pytest.mark.parametrize(("given", "expected"), [(None, "1000"), ("7", "7")])
def test_a_thread_spins_shortly_unless_the_user_says_otherwise(given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if given is not None:
        environment["GOMP_SPINCOUNT"] = given
    done = subprocess.run(
        [sys.executable, "-c", SAID], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [expected, "False"]
