"""Which tests need no run since nothing that they prove has changed: `python tests/proved.py skip`, `targets`, `write`,
`show`, `prove GROUP...` or `busy GROUP...`.

A group of tests is proved for a digest: of the sources it proves, its own files, and the tested versions. `make
test-all` runs every group and then writes the digests to tests/proved.json, which is committed. `make test`, and so CI,
leaves out a group whose digest is the committed one, says so, and runs a group of any other digest. `prove` runs single
groups, logs each file of the repository that they and their processes read (tests/readlog/), and writes a digest only
if the group covers all of these files. `busy` does the same beside a process that never rests, and notes each round in
tests/busy.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from busy import spinning
from provedgroups import GROUPS
from testgroup import ROOT, Group, file_name

__all__ = ["GROUPS", "ROOT", "Group"]
FILE = ROOT / "tests" / "proved.json"
ROUNDS = ROOT / "tests" / "busy.json"
TARGETS = ("browsers", "types")
"""groups that a target of the Makefile of the same name checks"""


def proved(root: Path | None = None) -> set[str]:
    """Return the groups that were proved as they are. root: None is this repository."""
    root = root or ROOT
    path = root / FILE.relative_to(ROOT)
    stored = json.loads(path.read_text()) if path.exists() else {}
    return {name for name, group in GROUPS.items() if stored.get(name, {}).get("digest") == group.digest(root)}


def skip() -> None:
    """Print pytest's arguments that leave out what is proved, and to stderr what is left out."""
    for name in sorted(proved()):
        files = GROUPS[name].files()
        print(f"Left out: {len(files)} files of {name}, unchanged since `make test-all` passed.", file=sys.stderr)
        print(*(f"--ignore={path.relative_to(ROOT)}" for path in files))


def targets() -> None:
    """Print the targets of the Makefile that check a group, but for those that are proved; name these on stderr."""
    done = proved()
    for name in TARGETS:
        if name in done:
            print(f"Left out: {name}, unchanged since `make test-all` passed.", file=sys.stderr)
        else:
            print(name)


def write(names: Iterable[str] = tuple(GROUPS)) -> None:
    """Note that groups passed as they are now."""
    today = datetime.now(UTC).date().isoformat()
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    digests = stored | {name: {"digest": GROUPS[name].digest(ROOT), "date": today} for name in names}
    FILE.write_text(json.dumps({name: digests[name] for name in sorted(digests) if name in GROUPS}, indent=1) + "\n")


def prove(*names: str, beside: bool = False) -> int:
    """Run groups, one after the other, and note each that passes and covers what it reads. Return 1 if one does not.
    beside: a process that never rests, and the rounds are noted."""
    failed = 0
    if not names or set(names) - set(GROUPS):
        print(f"Name one or more of these groups: {', '.join(GROUPS)}.", file=sys.stderr)
        return 2
    for name in names:
        group, before = GROUPS[name], GROUPS[name].digest(ROOT)
        with tempfile.TemporaryDirectory() as log:
            paths = [str(Path(__file__).parent / "readlog"), *filter(None, [os.environ.get("PYTHONPATH")])]
            settings = {"PYTHONPATH": os.pathsep.join(paths), "KVLENS_READ_LOG": log, "KVLENS_READ_ROOT": str(ROOT)}
            command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
            begun = time.monotonic()
            with spinning() if beside else contextlib.nullcontext():
                ended = subprocess.run(
                    [*command, *map(str, group.files(ROOT))], cwd=ROOT, env=os.environ | settings, check=False
                )
            if beside:
                note_round(name, group, ended.returncode == 0, time.monotonic() - begun)
            if name == "types" and not ended.returncode:
                ended = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, check=False)
            read = files_read(Path(log))
        missing = sorted(read.keys() - set(group.covered(ROOT)))
        for path in missing:
            print(f"{name} reads {file_name(path, ROOT)}, which it does not cover: {', '.join(sorted(read[path]))}.")
        if ended.returncode or missing or group.digest(ROOT) != before:
            failed = 1
        else:
            write([name])
    return failed


def busy(*names: str) -> int:
    """Run groups as `prove` does, beside a process that never rests."""
    return prove(*names, beside=True)


def note_round(name: str, group: Group, passed: bool, seconds: float) -> None:
    """Append a round of a group to ROUNDS."""
    rounds = json.loads(ROUNDS.read_text()) if ROUNDS.exists() else []
    today = datetime.now(UTC).date().isoformat()
    row = {"group": name, "date": today, "files": len(group.files(ROOT)), "passed": passed, "seconds": round(seconds)}
    ROUNDS.write_text("[\n" + ",\n".join(json.dumps(each) for each in [*rounds, row]) + "\n]\n")


def files_read(log: Path) -> dict[Path, set[str]]:
    """Return the files of the repository, as Git lists them, that processes read, and for each the test files that ran
    then. log: the folder of their logs."""
    lines = {line for path in log.iterdir() for line in path.read_text(errors="replace").splitlines()}
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {path for name in tracked.split("\0") if name and (path := (ROOT / name).resolve()).is_file()}
    read: dict[Path, set[str]] = {}
    for line in lines:
        name, _, test = line.rpartition("\t")
        if (path := Path(name).resolve()) in files:
            read.setdefault(path, set()).add(test or "between tests")
    return read


def show() -> None:
    """Print every group and whether it is proved."""
    done = proved()
    for name, group in GROUPS.items():
        print(f"{name}: {len(group.files())} files, {'proved' if name in done else 'to run'}")


if __name__ == "__main__":
    commands: dict[str, Callable[..., int | None]] = {
        "skip": skip,
        "targets": targets,
        "write": write,
        "show": show,
        "prove": prove,
        "busy": busy,
    }
    sys.exit(commands[sys.argv[1]](*sys.argv[2:]))
