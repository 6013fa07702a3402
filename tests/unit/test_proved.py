"""Which tests are left out since nothing that they prove has changed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import proved
import pytest
from provedgroups import WHOLE
from testgroup import matching_files
from warmprocess import reading_environment


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (
        *("kernels/a.py", "kernels/deep/b.py", "tests/kernels/test_a.py", "other.py", "README.md"),
        *("kvlens/lab/gpu/c.py", "kvlens/lab/bench/d.py", "kvlens/engine/e.py", "kvlens/app/f.py"),
        *("kvlens/demo/weights/g.safetensors", "tests/synthetic/h.py", "tests/fault/conftest.py", "pyproject.toml"),
        *("kvlens/lab/commands/i.py", "kvlens/app/commands/j.py", "kvlens/app/k.svg"),
        *("docs/evidence/performance.md", "docs/evidence/l.svg"),
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


EVERY = set(proved.GROUPS)


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("kernels/deep/b.py", EVERY),
        ("kernels/new.py", EVERY),
        ("tests/kernels/test_a.py", {"kernels", "others", "types"}),
        ("requirements.txt", EVERY),
        ("pyproject.toml", EVERY),
        ("kvlens/lab/gpu/c.py", EVERY - {"core", "examples", "carrying"}),
        ("kvlens/lab/bench/d.py", EVERY - {"core", "kernels", "examples"}),
        ("kvlens/lab/commands/i.py", EVERY - {"core", "kernels"}),
        ("kvlens/engine/e.py", EVERY),
        ("kvlens/app/f.py", EVERY - {"core", "kernels", "device", "lab"}),
        ("kvlens/app/k.svg", {"browsers", "examples", "lens", "others", "pages", "processes"}),
        ("kvlens/app/commands/j.py", EVERY - {"core", "kernels"}),
        ("kvlens/demo/weights/g.safetensors", EVERY - {"types"}),
        ("tests/synthetic/h.py", EVERY - {"kernels", "device", "examples", "carrying"}),
        ("tests/fault/conftest.py", {"others", "processes", "types"}),
        ("README.md", {"examples"}),
        ("docs/evidence/performance.md", {"device", "lab", "others"}),
        ("docs/evidence/l.svg", {"lab", "others"}),
    ],
)
def test_a_change_runs_the_tests_again(root: Path, name: str, again: set[str]) -> None:
    (root / name).write_text("changed")
    assert proved.proved(root) == EVERY - again


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


OFFERED = {"kvlens/cli/main.py": "commands", "kvlens/tasks/__init__.py": "tasks"}
"""file -> the modules of the storeys above that it finds by their name (kvlens/storeys.py)"""


@cache
def imported(path: Path) -> frozenset[Path]:
    """Return the repository's files that a file imports, inside its functions too; of a storey's commands, which every
    command loads and few run, at their beginning alone."""
    names = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if path.parent.name == "commands" else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    offered = OFFERED.get(path.relative_to(proved.ROOT).as_posix())
    by_name = set(proved.ROOT.glob(f"kvlens/*/{offered}/*.py")) if offered else set()
    return frozenset({file for name in names for file in module_files(name, path.parent)} | by_name)


def module_files(name: str, folder: Path) -> Iterator[Path]:
    """Yield the file of a module: of the package, of what is linked into it, or of the folders that tests import.
    folder: that of the importing file, where a test's helpers lie beside it."""
    parts = name.split(".")
    linked = parts[:1] == ["kvlens"] and parts[1:2] in (["kernels"], ["store"])
    beside = [folder.joinpath(*parts)] if folder.is_relative_to(proved.ROOT / "tests") else []
    for base in (proved.ROOT.joinpath(*parts[linked:]), proved.ROOT.joinpath("tests", *parts), *beside):
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


def test_a_group_is_noted_if_it_passes_and_covers_what_its_processes_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "open('tests/read.txt').read()"
    test = f"import subprocess, sys\ndef test_it(): subprocess.run([sys.executable, '-c', {code!r}], check=True)\n"
    files = {"tests/test_it.py": test, "tests/read.txt": "1", "tests/unread.txt": "2", "pyproject.toml": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run("git init -q && git add .", shell=True, cwd=tmp_path, check=True)
    tests = ("tests/test_it.py",)
    groups = {"blind": ("pyproject.toml",), "whole": ("pyproject.toml", "tests/read.txt")}
    monkeypatch.setattr(proved, "ROOT", tmp_path)
    monkeypatch.setattr(proved, "FILE", tmp_path / "tests" / "proved.json")
    monkeypatch.setattr(proved, "GROUPS", {name: proved.Group(tests, sources) for name, sources in groups.items()})
    assert proved.prove("other") == 2
    assert proved.prove("blind") == 1
    assert proved.prove("whole") == 0
    assert set(json.loads(proved.FILE.read_text())) == {"whole"}
    monkeypatch.setattr(proved, "ROUNDS", tmp_path / "tests" / "busy.json")
    assert proved.busy("whole") == 0
    (tmp_path / "tests" / "read.txt").unlink()
    assert proved.busy("whole") == 1
    assert proved.proved() == set()
    rounds = json.loads(proved.ROUNDS.read_text())
    assert [(row["group"], row["files"], row["passed"]) for row in rounds] == [("whole", 1, True), ("whole", 1, False)]


def test_a_busy_round_notes_every_group_and_the_tests_in_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: f"def test_it(): assert {name != 'bad'}\n" for name in ("good", "bad", "rest")}
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").touch()
    for name, text in files.items():
        (tmp_path / "tests" / f"test_{name}.py").write_text(text)
    subprocess.run("git init -q && git add .", shell=True, cwd=tmp_path, check=True)
    for name, value in {"ROOT": tmp_path, "FILE": tmp_path / "p.json", "ROUNDS": tmp_path / "b.json"}.items():
        monkeypatch.setattr(proved, name, value)
    groups = {name: proved.Group((f"tests/test_{name}.py",), ("pyproject.toml",)) for name in ("good", "bad")}
    monkeypatch.setattr(proved, "GROUPS", groups)
    monkeypatch.setattr(proved, "WHOLE", ("tests/test_rest.py",))
    assert proved.busy_round() == 1
    assert set(json.loads(proved.FILE.read_text())) == {"good"}
    rounds = json.loads(proved.ROUNDS.read_text())
    assert {row["at_once"] for row in rounds} == {3}
    assert {row["group"]: row["passed"] for row in rounds} == {"good": True, "bad": False, "whole": True}
    assert {path.stem for path in (tmp_path / "test-results" / "round").iterdir()} == {"good", "bad", "whole"}
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_processes_of_tests_log_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "readlog")
    monkeypatch.setenv("KVLENS_READ_LOG", "log")
    monkeypatch.delenv("KVLENS_READ_ROOT", raising=False)
    path = os.pathsep.join(("readlog", "installed"))
    assert reading_environment(Path("installed")) == {"PYTHONPATH": path, "KVLENS_READ_LOG": "log"}
    monkeypatch.delenv("PYTHONPATH")
    assert reading_environment(Path("installed"))["PYTHONPATH"] == "installed"


def test_helpers_beside_a_test_are_among_its_imports() -> None:
    test = proved.ROOT / "tests" / "unit" / "test_freekv.py"
    assert {test.with_name("freekv_reference.py"), test.with_name("freekv_trial.py")} <= imported(test)


def test_what_has_a_target_of_its_own_is_one_unless_it_is_proved(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for done, targets in (({"types"}, "browsers\n"), ({"browsers", "core"}, "types\n"), (set(), "browsers\ntypes\n")):
        monkeypatch.setattr(proved, "proved", lambda done=done: done)
        proved.targets()
        assert capsys.readouterr().out == targets


def test_every_test_is_in_one_group_or_looks_at_the_whole_repository() -> None:
    grouped = [path for group in proved.GROUPS.values() for path in group.files()]
    whole = matching_files(WHOLE, proved.ROOT)
    assert len(whole) == len(WHOLE)
    assert sorted([*grouped, *whole]) == matching_files(("tests/*/test_*.py",), proved.ROOT)
