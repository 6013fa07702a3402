"""The first example of docs/api.md runs on the real model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvlens

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_first_example_flips_the_answer_of_the_real_model(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVLENS_MODEL", "smollm2")
    (code,) = re.findall(r"^```python real\n(.*?)^```", PAGE, re.M | re.S)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 7, "with the line that installs, eight"
    names: dict[str, object] = {}
    exec(compile(code, "docs/api.md", "exec"), names)
    run, held = names["run"], names["held"]
    assert isinstance(run, kvlens.Run)
    assert isinstance(held, kvlens.Run)
    assert (run.verdict.outcome, run.verdict.right, run.verdict.reason) == ("lost", False, "partly_evicted")
    assert held.restored is True
    assert held.output.strip().startswith("48213")
    assert str(run.verdict) in capsys.readouterr().out
