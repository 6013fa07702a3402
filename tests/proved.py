"""Which tests need no run since nothing that they prove has changed: `python tests/proved.py skip`, `targets`, `write`,
`show`, `prove GROUP...`, `busy GROUP...` or `round`.

A group of tests is proved for a digest: of the sources it proves, its own files, and the tested versions. `make
test-all` runs every group and then writes the digests to tests/proved.json, which is committed. `make test`, and so CI,
leaves out a group whose digest is the committed one, says so, and runs a group of any other digest. `prove` runs single
groups, logs each file of the repository that they and their processes read (tests/readlog/), and writes a digest only
if the group covers all of these files. `busy` does the same beside a process that never rests, and notes each round in
tests/busy.json; `round` does it with all groups, three at a time, and with the tests that are in no group (`whole`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from busy import spinning
from provedgroups import GROUPS, WHOLE
from testgroup import ROOT, Group, file_name

__all__ = ["GROUPS", "ROOT", "Group"]
FILE = ROOT / "tests" / "proved.json"
ROUNDS = ROOT / "tests" / "busy.json"
NOTING = threading.Lock()
"""held while a group or a round is noted"""
AT_ONCE = 3
"""groups that a busy round runs side by side"""
LONG = {"core": 0, "others": 1, "browsers": 2, "pages": 3}
"""groups that a busy round begins with, so that they do not end it alone"""
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
    if not names or set(names) - set(GROUPS):
        print(f"Name one or more of these groups: {', '.join(GROUPS)}.", file=sys.stderr)
        return 2
    with spinning() if beside else contextlib.nullcontext():
        failed = [name for name in names if not prove_group(name, int(beside))]
    return int(bool(failed))


def prove_group(name: str, at_once: int = 0, output: IO[str] | None = None) -> bool:
    """Run a group and note it if it passes and covers what it reads. Return whether it does. at_once: groups that run
    side by side in a busy round; the round is noted. 0: no busy round. output: a file for what pytest prints."""
    group, before = GROUPS[name], GROUPS[name].digest(ROOT)
    with tempfile.TemporaryDirectory() as log:
        paths = [str(Path(__file__).parent / "readlog"), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {"PYTHONPATH": os.pathsep.join(paths), "KVLENS_READ_LOG": log, "KVLENS_READ_ROOT": str(ROOT)}
        begun = time.monotonic()
        status = run_tests(group.files(ROOT), settings, output)
        if name == "types" and not status:
            command = [sys.executable, "-m", "mypy"]
            status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False).returncode
        if at_once:
            note_round(name, len(group.files(ROOT)), status == 0, time.monotonic() - begun, at_once)
        read = files_read(Path(log))
    missing = sorted(read.keys() - set(group.covered(ROOT)))
    for path in missing:
        print(f"{name} reads {file_name(path, ROOT)}, which it does not cover: {', '.join(sorted(read[path]))}.")
    changed = group.digest(ROOT) != before
    if changed:
        print(f"{name} is not noted: its sources changed while it ran.")
    if status or missing or changed:
        return False
    with NOTING:
        write([name])
    return True


def run_tests(files: Iterable[Path | str], settings: dict[str, str], output: IO[str] | None) -> int:
    """Run test files in two processes and return pytest's status."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    environment = os.environ | settings
    return subprocess.run(
        [*command, *map(str, files)], cwd=ROOT, env=environment, stdout=output, stderr=output, check=False
    ).returncode


def busy(*names: str) -> int:
    """Run groups as `prove` does, beside a process that never rests."""
    return prove(*names, beside=True)


def busy_round() -> int:
    """Run every test beside a process that never rests, AT_ONCE groups at a time, and note each group's round. What
    pytest prints goes to a file for each group. Return 1 if a group failed."""
    folder = ROOT / "test-results" / "round"
    folder.mkdir(parents=True, exist_ok=True)

    def attempt(name: str) -> bool:
        with (folder / f"{name}.log").open("w") as output:
            begun = time.monotonic()
            if name in GROUPS:
                passed = prove_group(name, AT_ONCE, output)
            else:
                passed = run_tests(WHOLE, {}, output) == 0
                note_round(name, len(WHOLE), passed, time.monotonic() - begun, AT_ONCE)
        print(f"{name}: {'passed' if passed else 'FAILED'}, {time.monotonic() - begun:.0f} s", flush=True)
        return passed

    with spinning(), ThreadPoolExecutor(AT_ONCE) as pool:
        names = sorted([*GROUPS, "whole"], key=lambda name: LONG.get(name, len(LONG)))
        passed = list(pool.map(attempt, names))
    return int(not all(passed))


def note_round(name: str, files: int, passed: bool, seconds: float, at_once: int) -> None:
    """Append a round of a group to ROUNDS."""
    today = datetime.now(UTC).date().isoformat()
    row = {"group": name, "date": today, "files": files, "at_once": at_once, "passed": passed}
    row["seconds"] = round(seconds)
    with NOTING:
        rounds = json.loads(ROUNDS.read_text()) if ROUNDS.exists() else []
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
        "round": busy_round,
    }
    sys.exit(commands[sys.argv[1]](*sys.argv[2:]))
