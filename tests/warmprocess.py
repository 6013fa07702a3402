"""`kvlens` in a process of its own for each command, forked from one that has imported torch and transformers and
loaded a model once already: each loads its own, of what was imported and looked up by then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parent.parent
_SERVE = """
import gc, json, os, sys, traceback
import torch
import kvlens.cli.main, kvlens.runs.storing, kvlens.runs.reference, kvlens.engine.engine
from kvlens import methods
from kvlens.engine.models import load
load("demo"), methods.registry()
gc.collect(), gc.freeze()
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(order["streams"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        ended = 0
        try:
            exec(order["code"], {"torch": torch})
            sys.argv = ["kvlens", *order["arguments"]]
            kvlens.cli.main.main()
        except SystemExit as stop:
            ended = stop.code or 0
        except BaseException:
            traceback.print_exc()
            ended = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(ended)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def reading_environment(*folders: Path) -> dict[str, str]:
    """Return the variables of a process that imports from these folders, and logs what it reads where this one does
    (tests/readlog/)."""
    path = os.pathsep.join((*filter(None, [os.environ.get("PYTHONPATH")]), *map(str, folders)))
    return {"PYTHONPATH": path} | {name: value for name, value in os.environ.items() if name.startswith("KVLENS_READ_")}


class WarmProcess:
    """Commands one after the other. Used with `with`. installed: folders of packages that are there besides."""

    def __init__(self, *installed: Path) -> None:
        self._folders = (*installed, ROOT, ROOT / "tests")

    def __enter__(self) -> WarmProcess:
        environment = os.environ | reading_environment(*self._folders)
        self._parent = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(120)

    def begin(self, folder: Path, code: str, *arguments: str) -> int:
        """The process id of `kvlens *arguments` after `code`, which fakes something. folder: for what it prints."""
        self._arguments, self._streams = arguments, [folder / name for name in ("out", "err")]
        for path in self._streams:
            path.unlink(missing_ok=True)
        assert self._parent.stdin is not None
        order = {"code": code, "arguments": arguments, "streams": [str(path) for path in self._streams]}
        print(json.dumps(order), file=self._parent.stdin, flush=True)
        return self._told()

    def end(self) -> subprocess.CompletedProcess[str]:
        """Waits for what was begun. Its status is -9 when it was killed by signal 9."""
        return subprocess.CompletedProcess(
            self._arguments, self._told(), *(path.read_text(encoding="utf-8") for path in self._streams)
        )

    def kvlens(self, folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Begun and waited for."""
        self.begin(folder, code, *arguments)
        return self.end()

    def _told(self) -> int:
        assert self._parent.stdout is not None
        return int(self._parent.stdout.readline())
