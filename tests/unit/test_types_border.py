"""mypy sees through every border between the product's folders: a wrong call is an error, not Any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRONG = """
import kvlens.kernels.no_such_module
from kvlens.kernels.page_attend import page_attention
from kvlens.kernels.merge import merge
from kvlens.kernels.page_scores import page_scores
from kvlens.budget import Budget
from kvlens.store.reader import TraceReader


def wrong(reader: TraceReader) -> None:
    reader.no_such_method(1, 2, 3)
    reader.span("three")
    page_attention(1, 2, 3)
    page_scores(reader)
    number: str = reader.prompt_tokens()
    merge("text")
    Budget.parse("20%").no_such_attribute
"""
ERRORS = {
    2: {"import-untyped", "import-not-found"},
    11: {"attr-defined"},
    12: {"arg-type"},
    13: {"call-arg", "arg-type"},
    14: {"call-arg", "arg-type"},
    15: {"assignment"},
    16: {"call-arg", "arg-type"},
    17: {"attr-defined"},
}
"""line of WRONG -> codes of mypy's errors, one of which is reported at least"""


def test_a_wrong_call_across_a_border_is_an_error(tmp_path: Path) -> None:
    snippet = tmp_path / "wrong.py"
    snippet.write_text(WRONG)
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--show-error-codes", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path / "cache"), str(snippet)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    codes: dict[int, set[str]] = {}
    for line in done.stdout.splitlines():
        if f"{snippet.name}:" in line and ": error: " in line:
            place, code = line.split(f"{snippet.name}:")[1].split(":")[0], line.rsplit("[", 1)[1].rstrip("]")
            codes.setdefault(int(place), set()).add(code)
    assert codes.keys() == ERRORS.keys(), done.stdout
    assert all(codes[line] & expected for line, expected in ERRORS.items()), done.stdout
