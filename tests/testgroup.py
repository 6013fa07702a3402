"""A group of tests that prove a part of the sources only, and the digest of these sources (tests/provedgroups.py)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Group:
    """Test files, and the sources whose change runs them again; glob patterns relative to the repository. `core`: CORE,
    of which files below the folders `without` are no sources. `but`: what `tests` matches and the group leaves out."""

    tests: tuple[str, ...]
    sources: tuple[str, ...]
    core: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    def files(self, root: Path = ROOT) -> list[Path]:
        """Return the test files, in order."""
        left = set(matching_files(self.but, root))
        return [path for path in matching_files(self.tests, root) if path not in left]

    def covered(self, root: Path = ROOT) -> list[Path]:
        """Return the test files and the sources, in order: a change of any runs the tests again."""
        core = [path for path in matching_files(self.core, root) if not file_name(path, root).startswith(self.without)]
        return sorted({*self.files(root), *matching_files(self.sources, root), *core})

    def digest(self, root: Path = ROOT) -> str:
        """Return the SHA-256 of all names and contents."""
        total = hashlib.sha256()
        for path in self.covered(root):
            total.update(file_name(path, root).encode() + b"\0")
            total.update(hashlib.sha256(path.read_bytes()).digest())
        return total.hexdigest()


def matching_files(patterns: tuple[str, ...], root: Path) -> list[Path]:
    """Return the files of glob patterns below a folder, in order."""
    return sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()})


def file_name(path: Path, root: Path) -> str:
    """Return the name of a file relative to a folder, with slashes."""
    return path.relative_to(root).as_posix()
