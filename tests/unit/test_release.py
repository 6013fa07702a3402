"""`make release-check`: each thing that is wrong is found, in a small repository made here and in this one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import release

from kvlens import __version__

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = """[project]
name = "kvlens"
dynamic = ["version"]
[tool.setuptools.dynamic]
version = { attr = "kvlens.__version__" }
[tool.setuptools]
packages = ["kvlens"]
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A package of one file that is ready for its tag."""
    write(tmp_path, "kvlens/__init__.py", '__version__ = "1.2.3"\n')
    write(tmp_path, "pyproject.toml", PYPROJECT)
    write(tmp_path, "CHANGELOG.md", "# Changelog\n\n## [1.2.3] - 2026-01-31\n\n## [1.2.2] - 2026-01-01\n")
    write(tmp_path, "README.md", "```\nkvlens run FILE --method snapkv\nmake test\n```\nSee `kvlens models add X`.\n")
    write(tmp_path, "Makefile", ".PHONY: test\n")
    release.git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    """Write a file of the repository."""
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")


def commit(root: Path) -> None:
    """Commit all files."""
    release.git(root, "add", "-A")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(root), *author, "commit", "-qm", "x"], check=True)


def test_a_ready_repository_has_no_problem(repository: Path) -> None:
    assert release.tree(repository) == []
    assert release.versions(repository) == []
    assert release.machine_paths(repository) == []
    assert release.commands(repository) == []
    assert release.wheel(repository) == []


def test_a_file_that_is_not_committed_is_found(repository: Path) -> None:
    write(repository, "notes.txt", "x\n")
    assert len(release.tree(repository)) == 1


@pytest.mark.parametrize("top", ["## [1.2.4] - 2026-02-01", "## [Unreleased]", "## [1.2.3]"])
def test_a_changelog_with_another_top_entry_is_found(repository: Path, top: str) -> None:
    write(repository, "CHANGELOG.md", f"# Changelog\n\n{top}\n\n## [1.2.2] - 2026-01-01\n")
    assert len(release.versions(repository)) == 1


def test_a_path_of_a_machine_is_found_with_its_line(repository: Path) -> None:
    write(
        repository, "docs.md", "fine: /etc/hosts, a/home/b, https://example.org/home/page\n" + "bad: /ho" + "me/ann/x\n"
    )
    commit(repository)
    assert [problem.split()[0] for problem in release.machine_paths(repository)] == ["docs.md:2"]


@pytest.mark.parametrize("line", ["kvlens fly FILE", "make fly"])
def test_a_command_that_does_not_exist_is_found(repository: Path, line: str) -> None:
    write(repository, "README.md", f"```\n{line}\n```\n")
    assert len(release.commands(repository)) == 1


def test_a_wheel_of_another_version_is_found(repository: Path) -> None:
    write(repository, "pyproject.toml", PYPROJECT.replace('dynamic = ["version"]', 'version = "9.9"'))
    commit(repository)
    assert len(release.wheel(repository)) == 1


def test_this_repository_states_one_version() -> None:
    assert release.version(ROOT) == __version__
    assert release.versions(ROOT) == []
    assert f'version = "{__version__}"' not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_no_file_of_this_repository_names_a_path_of_a_machine() -> None:
    assert release.machine_paths(ROOT) == []


def test_every_command_of_the_readme_exists() -> None:
    assert release.commands(ROOT) == []
