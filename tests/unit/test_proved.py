"""Which tests are left out since nothing that they prove has changed."""

from __future__ import annotations

import json
from pathlib import Path

import proved
import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (
        *("kernels/a.py", "kernels/deep/b.py", "tests/kernels/test_a.py", "other.py", "README.md"),
        *("kvlens/lab/gpu/c.py", "kvlens/lab/bench/d.py", "kvlens/engine/e.py", "kvlens/app/f.py"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    digests = {name: {"digest": group.digest(tmp_path)} for name, group in proved.GROUPS.items()}
    (tmp_path / "tests" / "proved.json").write_text(json.dumps(digests))
    return tmp_path


def test_what_is_unchanged_is_proved(root: Path) -> None:
    assert proved.proved(root) == set(proved.GROUPS)
    (root / "other.py").write_text("changed")
    assert proved.proved(root) == set(proved.GROUPS)


@pytest.mark.parametrize(
    ("name", "remaining"),
    [
        ("kernels/deep/b.py", set()),
        ("kernels/new.py", set()),
        ("tests/kernels/test_a.py", {"device", "examples", "lab", "carrying", "types"}),
        ("requirements.txt", set()),
        ("kvlens/lab/gpu/c.py", {"kernels", "examples", "lab", "carrying"}),
        ("kvlens/lab/bench/d.py", {"kernels", "device", "examples"}),
        ("kvlens/engine/e.py", {"kernels", "device"}),
        ("kvlens/app/f.py", {"kernels", "device", "examples", "lab", "carrying"}),
        ("README.md", {"kernels", "device", "lab", "carrying", "types"}),
    ],
)
def test_a_change_runs_the_tests_again(root: Path, name: str, remaining: set[str]) -> None:
    (root / name).write_text("changed")
    assert proved.proved(root) == remaining


def test_a_file_that_went_runs_the_tests_again(root: Path) -> None:
    (root / "kernels" / "a.py").unlink()
    assert proved.proved(root) == set()


def test_nothing_is_proved_before_a_first_pass(root: Path) -> None:
    (root / "tests" / "proved.json").unlink()
    assert proved.proved(root) == set()


def test_the_groups_name_files_that_exist() -> None:
    for group in proved.GROUPS.values():
        assert group.files()
        for pattern in (*group.tests, *group.sources):
            assert list(proved.ROOT.glob(pattern)), pattern


def test_types_are_a_target_unless_they_are_proved(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for done, target in (({"types"}, ""), (set(), "types\n")):
        monkeypatch.setattr(proved, "proved", lambda done=done: done)
        proved.types()
        assert capsys.readouterr().out == target
