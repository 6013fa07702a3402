"""The lint for vague names: what counts as one, and that a count may only go down."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

import ratchet
import vaguenames


def found_in(source: str) -> list[str]:
    """Return the vague names of a source."""
    return [name for name, _ in vaguenames.names(ast.parse(source)) if vaguenames.is_vague(name)]


def test_parameters_and_assigned_names_count_and_what_is_read_does_not() -> None:
    source = "def take(at, *, _kept):\n    said = at + other.given\n    for one in said:\n        found, rows = one\n"
    assert sorted(found_in(source)) == ["_kept", "at", "found", "one", "said"]


def test_a_word_within_a_name_is_no_vague_name() -> None:
    assert found_in("found_rows = kept_tokens = first_step = attention = 1\n") == []


def test_a_count_may_fall_and_may_not_rise() -> None:
    present = Counter({"a.py": 2, "b.py": 1, "new.py": 1})
    assert ratchet.rises(present, {"a.py": 2, "b.py": 3, "gone.py": 4}) == ["new.py"]
    assert ratchet.rises(present, {"a.py": 1, "b.py": 1, "new.py": 1}) == ["a.py"]


def test_files_are_those_of_the_repository_outside_tests(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "tests").mkdir()
    for name in ("tests/a.py", "b.py"):
        (tmp_path / name).write_text("found = 1\n", encoding="utf-8")
    (tmp_path / "link.py").symlink_to("b.py")
    assert vaguenames.python_files(tmp_path) == ["b.py"]
    assert vaguenames.counts(tmp_path) == {"b.py": 1}
    assert vaguenames.share(tmp_path) == 1.0


def test_no_file_has_more_vague_names_than_its_baseline() -> None:
    assert ratchet.rises(vaguenames.counts(), ratchet.read_baseline(vaguenames.BASELINE)) == []
