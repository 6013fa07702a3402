"""How many files a run passes through: `python -m kvlens.lab.studies.passage --methods snapkv,sekv`.

Counts with `sys.setprofile` on the demo model, in this repository's files alone: the files and the hops of one layer
of one decode step, and the files that a whole run enters. A file is entered if one of its functions is called. A hop is
a call from one file into another; calls through the library and comprehensions are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from kvlens import PACKAGE, methods
from kvlens.engine.session import Session
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.tasks import ask, get, prompt_of
from kvlens.tasks.encoding import encoding

LAYER, STEP = 3, 9
"""the layer and the decode step that are counted"""
PROMPT_TOKENS, NEW, SHARE = 512, 16, "30%"
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


@dataclass
class Passage:
    """The files whose functions were called, and the calls from one of them into another."""

    files: set[str] = field(default_factory=set)
    hops: int = 0

    def count(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take note of a call, as `sys.setprofile` reports it."""
        if event != "call" or frame.f_code.co_name in COMPREHENSIONS or not frame.f_code.co_flags & 1:
            return
        file = own_file(frame.f_code.co_filename)
        if file is None:
            return
        self.files.add(file)
        caller: FrameType | None = frame.f_back
        while caller is not None and own_file(caller.f_code.co_filename) is None:
            caller = caller.f_back
        self.hops += caller is None or own_file(caller.f_code.co_filename) != file


@cache
def own_file(name: str) -> str | None:
    """Return the path in the package of a source; None for a source of another package, and for this file."""
    path = Path(name).resolve()
    if path == Path(__file__).resolve():
        return None
    for folder in (PACKAGE, (PACKAGE / "kernels").resolve(), (PACKAGE / "store").resolve()):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder.parent))
    return None


@contextmanager
def layer_counted(passage: Passage) -> Iterator[None]:
    """Inside, count what writes and attends LAYER at STEP."""

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(session: Session, layer: int, *arguments: Any) -> Any:
            step = session._position - session.context.prompt_tokens if session.decoding else -1
            if (layer, step) != (LAYER, STEP):
                return call(session, layer, *arguments)
            outer = sys.getprofile()
            sys.setprofile(passage.count)
            try:
                return call(session, layer, *arguments)
            finally:
                sys.setprofile(outer)

        return inner

    write, attend = Session.write, Session.attend
    Session.write, Session.attend = counted(write), counted(attend)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Session.write, Session.attend = write, attend  # type: ignore[method-assign]


def measure(method: str) -> tuple[Passage, Passage]:
    """Run a prompt of the demo model under the method twice: the passage of one layer, and of the whole run."""
    prompt = prompt_of(ask(get("multikey"), PROMPT_TOKENS, 0.5, 0, encoding("demo")))
    request = RunRequest(model="demo", method=method, budget=SHARE, max_new=NEW, ignore_eos=True)
    layer, whole = Passage(), Passage()
    with tempfile.TemporaryDirectory() as folder:
        with layer_counted(layer):
            carry_out(request, prompt, Path(folder), *quiet())
        threading.setprofile(whole.count)
        sys.setprofile(whole.count)
        try:
            carry_out(request, prompt, Path(folder), *quiet())
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return layer, whole


def quiet() -> tuple[Callable[..., None], Callable[[], bool]]:
    """Return a progress that shows nothing and a stop that never comes."""
    return (lambda phase, count, total: None), (lambda: False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="snapkv,sekv", help="comma-separated")
    parser.add_argument("--list", action="store_true", help="name the files of the layer too")
    options = parser.parse_args()
    print("| method | files of a layer | hops of a layer | files of a run |\n| --- | ---: | ---: | ---: |")
    for name in options.methods.split(","):
        methods.get(name)
        layer, whole = measure(name)
        print(f"| {name} | {len(layer.files)} | {layer.hops} | {len(whole.files)} |")
        if options.list:
            print(*sorted(layer.files), sep="\n")


if __name__ == "__main__":
    main()
