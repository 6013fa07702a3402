"""Which tests are left out since nothing that they prove has changed."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import proved
import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (
        *("kernels/a.py", "kernels/deep/b.py", "tests/kernels/test_a.py", "other.py", "README.md"),
        *("kvlens/lab/gpu/c.py", "kvlens/lab/bench/d.py", "kvlens/engine/e.py", "kvlens/app/f.py"),
        *("kvlens/demo/weights/g.safetensors", "tests/synthetic/h.py", "tests/fault/conftest.py", "pyproject.toml"),
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
        ("tests/kernels/test_a.py", {"device", "examples", "lab", "carrying", "processes", "types"}),
        ("requirements.txt", set()),
        ("pyproject.toml", {"kernels"}),
        ("kvlens/lab/gpu/c.py", {"examples", "carrying"}),
        ("kvlens/lab/bench/d.py", {"kernels", "examples"}),
        ("kvlens/engine/e.py", {"kernels"}),
        ("kvlens/app/f.py", {"kernels", "device", "examples", "lab", "carrying"}),
        ("kvlens/demo/weights/g.safetensors", {"kernels", "types"}),
        ("tests/synthetic/h.py", {"kernels", "device", "examples", "carrying", "types"}),
        ("tests/fault/conftest.py", {"kernels", "device", "examples", "lab", "carrying", "types"}),
        ("README.md", {"kernels", "device", "lab", "carrying", "processes", "types"}),
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
        for pattern in (*group.tests, *group.sources, *group.core):
            assert list(proved.ROOT.glob(pattern)), pattern


@cache
def imported(path: Path) -> frozenset[Path]:
    """Return the repository's files that a file imports, inside its functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(file for name in names for file in module_files(name))


def module_files(name: str) -> Iterator[Path]:
    """Yield the file of a module: of the package, of what is linked into it, or of the folders that tests import."""
    parts = name.split(".")
    linked = parts[:1] == ["kvlens"] and parts[1:2] in (["kernels"], ["store"])
    for base in (proved.ROOT.joinpath(*parts[linked:]), proved.ROOT.joinpath("tests", *parts)):
        yield from (file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file())


def reached(group: proved.Group, depth: int) -> set[Path]:
    """Return what a group's tests and their folders' fixtures import, up to `depth` imports away."""
    found = set(group.files())
    found |= {file for test in group.files() if (file := test.with_name("conftest.py")).is_file()}
    for _ in range(depth):
        more = {file for path in found for file in imported(path)} - found
        if not more:
            break
        found |= more
    return found


def data_of(modules: set[Path]) -> set[Path]:
    """Return the data files of the modules' folders, and of the folders below these that hold no modules."""
    folders = {path.parent for path in modules if path.is_relative_to(proved.ROOT / "kvlens")}
    below = {inner for folder in folders for inner in folder.iterdir() if inner.is_dir() and not inner.is_symlink()}
    bare = {folder for folder in below if not list(folder.glob("*.py"))}
    files = {file for folder in folders | bare for file in folder.glob("*") if file.is_file()}
    return {file for file in files if file.suffix not in {".py", ".pyc", ".typed"}}


@pytest.mark.parametrize(("name", "depth"), [(name, 1 if name == "kernels" else 99) for name in proved.GROUPS])
def test_all_that_the_tests_of_a_group_import_runs_them_again(name: str, depth: int) -> None:
    """Of the kernels what their tests import themselves; of others whatever these import, and the data beside it."""
    group = proved.GROUPS[name]
    modules = reached(group, depth)
    needed = modules | (data_of(modules) if depth > 1 else set())
    missing = {path.relative_to(proved.ROOT).as_posix() for path in needed - set(group.covered())}
    assert missing == set()


def test_types_are_a_target_unless_they_are_proved(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for done, target in (({"types"}, ""), (set(), "types\n")):
        monkeypatch.setattr(proved, "proved", lambda done=done: done)
        proved.types()
        assert capsys.readouterr().out == target
