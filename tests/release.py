"""Whether this commit can be tagged as a release: `make release-check`.

Each check returns sentences that name what is wrong and what to do; no sentence means ready. The wheel is built from
what the last commit holds, in a temporary folder, without the network."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import readmetext

ROOT = Path(__file__).resolve().parents[1]
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|work|Users/[A-Za-z]\w*|home/[a-z]\w*)/[\w.]")
"""an absolute path below somebody's own folder"""


def main() -> int:
    """Print every sentence and return 1, or print the version and return 0."""
    problems = [*tree(ROOT), *versions(ROOT), *machine_paths(ROOT), *commands(ROOT)]
    problems += wheel(ROOT) if not problems else []
    for problem in problems:
        print(problem)
    if not problems:
        print(f"Ready: git tag v{version(ROOT)}")
    return 1 if problems else 0


def version(root: Path) -> str:
    """Return the version that kvlens/__init__.py states."""
    match = re.search(r'^__version__ = "([^"]+)"$', (root / "kvlens/__init__.py").read_text(encoding="utf-8"), re.M)
    return match.group(1) if match else ""


def versions(root: Path) -> list[str]:
    """Check that the top entry of the changelog is dated and has the package's version."""
    stated = version(root)
    entries = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (root / "CHANGELOG.md").read_text("utf-8"), re.M)
    if not stated or not entries:
        return ["No version: kvlens/__init__.py needs __version__, CHANGELOG.md an entry `## [VERSION] - DATE`."]
    top, date = entries[0]
    if top != stated:
        return [f"The changelog's top entry is {top}, kvlens/__init__.py has {stated}: make them equal."]
    return [] if date else [f"The changelog's entry {top} has no date: write `## [{top}] - YYYY-MM-DD`."]


def tree(root: Path) -> list[str]:
    """Check that everything is committed."""
    changed = git(root, "status", "--porcelain").splitlines()
    return (
        [f"{len(changed)} files are not committed, {changed[0][3:]} first: commit or remove them."] if changed else []
    )


def machine_paths(root: Path) -> list[str]:
    """Check that no committed text names a path of a machine."""
    problems = []
    for name in git(root, "ls-files", "-z").split("\0"):
        path = root / name
        if not name or path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        lines = [] if b"\0" in content[:8192] else content.decode("utf-8", "replace").splitlines()
        problems += [
            f"{name}:{number} names a path of a machine: remove it."
            for number, line in enumerate(lines, 1)
            if MACHINE_PATH.search(line)
        ]
    return problems


def commands(root: Path) -> list[str]:
    """Check that every kvlens command and make target of README.md exists."""
    page = root / "README.md"
    lines = [*readmetext.shell_lines(page), *readmetext.inline_commands(page)]
    known, targets = known_commands(), readmetext.make_targets(root)
    problems = []
    for line in lines:
        program, *arguments = shlex.split(line)
        if program == "kvlens" and not exists(readmetext.subcommand(line), known):
            problems.append(f"README.md names `{line}`, which is no command: see kvlens --help.")
        if program == "make" and not set(arguments) <= targets:
            problems.append(f"README.md names `{line}`, which the Makefile does not have.")
    return problems


def exists(words: list[str], known: set[tuple[str, ...]]) -> bool:
    """Return True if the command begins with a known one; a group needs one of its own commands or no word at all."""
    return any(tuple(words[:length]) in known for length in (2, 1))


def known_commands() -> set[tuple[str, ...]]:
    """Return the commands of kvlens: ("run",), ("models", "add")."""
    import typer.main

    from kvlens.cli.main import app

    found: set[tuple[str, ...]] = set()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        found.add((name,))
        found |= {(name, inner) for inner in getattr(command, "commands", {})}
    return found


def wheel(root: Path) -> list[str]:
    """Build the wheel of the last commit and check its version."""
    stated = version(root)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        archive = place / "tree.tar"
        git(root, "archive", "--output", str(archive), "HEAD")
        with tarfile.open(archive) as packed:
            packed.extractall(place / "tree", filter="tar")
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        build = subprocess.run([*pip, "-w", folder, str(place / "tree")], capture_output=True, text=True, check=False)
        built = [path.name for path in place.glob("*.whl")]
    if build.returncode:
        return [f"The wheel cannot be built: {build.stderr.strip().splitlines()[-1]}"]
    expected = f"kvlens-{stated}-"
    return (
        []
        if built and built[0].startswith(expected)
        else [f"The wheel is {built}, not {expected}*: see pyproject.toml."]
    )


def git(root: Path, *arguments: str) -> str:
    """Return what git prints in a repository."""
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
