"""`make busy` counts failures and leaves no process behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import busy
import pytest

FLAKY = """
from pathlib import Path
MARK = Path(__file__).with_name("rounds")

def test_passes():
    pass

def test_fails_in_the_second_round():
    rounds = len(MARK.read_text()) if MARK.exists() else 0
    MARK.write_text("x" * (rounds + 1))
    assert rounds != 1
"""


def test_a_test_that_fails_in_one_round_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = busy.subprocess.Popen

    def start(*arguments: Any, **keywords: Any) -> Any:
        started.append(popen(*arguments, **keywords))
        return started[-1]

    monkeypatch.setattr(busy, "SPIN", "import time; time.sleep(60)")
    monkeypatch.setattr(busy.subprocess, "Popen", start)
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    out = tmp_path / "rounds.json"
    target = str(tmp_path / "test_flaky.py")
    assert busy.main([target, "--times", "2", "--out", str(out)]) == 1
    first, second = json.loads(out.read_text())
    assert (first["outcomes"], first["failed"]) == ({"passed": 2}, [])
    assert second["outcomes"] == {"passed": 1, "failed": 1}
    assert [name.rpartition("::")[2] for name in second["failed"]] == ["test_fails_in_the_second_round"]
    assert started[0].poll() is not None


def test_a_round_without_a_count_is_broken() -> None:
    assert busy.count_outcomes("", 2) == {"broken": 1}
    assert busy.count_outcomes("3 passed, 1 error in 2.0s", 1) == {"passed": 3, "error": 1}
    assert busy.count_outcomes("3 passed in 2.0s", 3) == {"passed": 3, "broken": 1}
