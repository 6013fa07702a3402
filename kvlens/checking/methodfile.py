"""A method in a Python file that no package announces: read, registered in this process, and checked.

The file is code. Whoever reads it this way runs it with their own rights, as with a plugin that is installed."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

from kvlens import hangs, interrupts, methods
from kvlens.methods.base import Method

SUFFIX = ".py"
MOST_BYTES = 1_000_000
CODES = {
    "file_missing": "is not there, or is no file; give the path of a Python file",
    "file_too_large": f"has more than {MOST_BYTES:,} bytes, so it is no method's file",
    "file_fails": "cannot be loaded",
    "no_method": "defines no method: a subclass of kvlens.methods.base.Method with a name, a family and Parameters",
    "several_methods": "defines several methods: name one behind a colon, as in FILE.py:NAME",
    "name_taken": "has the name of another method; rename it",
}
"""code -> what is wrong with the file"""


class MethodFileRefused(ValueError):
    """A file that is no method's. `code`: one of CODES; `path`: the file; `detail`: what it raised, or its methods."""

    def __init__(self, code: str, path: Path, detail: str = "") -> None:
        self.code, self.path, self.detail = code, path, detail
        more = f" ({detail})" if detail else ""
        super().__init__(f"{code}: {path.name} {CODES[code]}{more}.")


def is_method_file(name: str) -> bool:
    """Return True for 'FILE.py' and 'FILE.py:NAME', False for a method's name."""
    return name.partition(f"{SUFFIX}:")[0].endswith(SUFFIX) or name.partition(f"{SUFFIX}:")[1] != ""


def read_method(name: str) -> type[Method]:
    """Run a file, register the method that it defines and return it. name: 'FILE.py', or 'FILE.py:NAME' of a file with
    several. Raises MethodFileRefused."""
    stem, separator, chosen_name = name.partition(f"{SUFFIX}:")
    path = Path(stem + SUFFIX if separator else name).expanduser()
    defined = _defined(_executed(path))
    if chosen_name:
        defined = [method for method in defined if method.name == chosen_name]
    if not defined:
        raise MethodFileRefused("no_method", path, f"named '{chosen_name}'" if chosen_name else "")
    if len(defined) > 1:
        raise MethodFileRefused("several_methods", path, ", ".join(method.name for method in defined))
    try:
        methods.register(defined[0])
    except ValueError as problem:
        raise MethodFileRefused("name_taken", path, str(problem)) from problem
    return defined[0]


def _executed(path: Path) -> ModuleType:
    """Return the file's module after it ran; whatever it prints goes to stderr."""
    if not path.is_file():
        raise MethodFileRefused("file_missing", path)
    if path.stat().st_size > MOST_BYTES:
        raise MethodFileRefused("file_too_large", path)
    name = f"kvlens_method_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    execute = spec.loader.exec_module
    try:
        with interrupts.watched(), redirect_stdout(sys.stderr):
            hangs.within(hangs.limit(hangs.IMPORT_VARIABLE), path.name, lambda: execute(module))
    except BaseException as problem:
        del sys.modules[name]
        if isinstance(problem, KeyboardInterrupt) and interrupts.by_person():
            raise
        words = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
        raise MethodFileRefused("file_fails", path, words) from problem
    return module


def _defined(module: ModuleType) -> list[type[Method]]:
    """The methods that a module defines itself and names, in the order of the file."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Method)
        and value.__module__ == module.__name__
        and "name" in vars(value)
    ]
