"""A method in a Python file that no package announces: read, registered in this process, and checked.

The file is code. Whoever reads it this way runs it with their own rights, as with a plugin that is installed."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import redirect_stdout
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from kvlens import hangs, interrupts, methods
from kvlens.methods.base import Method
from kvlens.methods.filenames import SUFFIX

MOST_BYTES = 1_000_000
CODES = {
    "file_missing": "is not there, or is no file; give the path of a Python file",
    "file_too_large": f"has more than {MOST_BYTES:,} bytes, so it is no method's file",
    "file_changed": "is not the text that was agreed to; read it again",
    "file_fails": "cannot be loaded",
    "no_method": "defines no method: a subclass of kvlens.methods.base.Method with a name, a family and Parameters",
    "several_methods": "defines several methods: name one behind a colon, as in FILE.py:NAME",
    "bad_method": "defines a class that cannot be a method",
    "name_taken": "has the name of another method; rename it",
}
"""code -> what is wrong with the file"""


class MethodFileRefused(ValueError):
    """A file that is no method's. `code`: one of CODES; `path`: the file; `detail`: what it raised, or its methods."""

    def __init__(self, code: str, path: Path, detail: str = "") -> None:
        self.code, self.path, self.detail = code, path, detail
        more = f" ({detail})" if detail else ""
        super().__init__(f"{code}: {path.name} {CODES[code]}{more}.")


def read_method(name: str, digest: str | None = None) -> type[Method]:
    """Run a file, register the method that it defines and return it. name: 'FILE.py', or 'FILE.py:NAME' of a file with
    several. digest: SHA-256 that the file must have, in hexadecimal digits; None: any. Raises MethodFileRefused."""
    stem, separator, chosen_name = name.partition(f"{SUFFIX}:")
    path = Path(stem + SUFFIX if separator else name).expanduser()
    defined = _defined(_executed(path, digest))
    if chosen_name:
        defined = [method for method in defined if method.name == chosen_name]
    if not defined:
        raise MethodFileRefused("no_method", path, f"named '{chosen_name}'" if chosen_name else "")
    if len(defined) > 1:
        raise MethodFileRefused("several_methods", path, ", ".join(method.name for method in defined))
    try:
        methods.register(defined[0])
    except ValueError as problem:
        code = "bad_method" if getattr(problem, "code", "") == "no_method" else "name_taken"
        raise MethodFileRefused(code, path, str(problem).rstrip(".")) from problem
    return defined[0]


class _Loader(SourceFileLoader):
    """Runs bytes that were read before, whatever the file or a cache of it holds by then."""

    def __init__(self, name: str, path: Path, source: bytes) -> None:
        super().__init__(name, str(path))
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._source, self.path)
        return code


def _executed(path: Path, digest: str | None) -> ModuleType:
    """Return the file's module after it ran; whatever it prints goes to stderr."""
    if not path.is_file():
        raise MethodFileRefused("file_missing", path)
    if path.stat().st_size > MOST_BYTES:
        raise MethodFileRefused("file_too_large", path)
    try:
        source = path.read_bytes()
    except OSError as problem:
        raise MethodFileRefused("file_fails", path, f"{type(problem).__name__}: {problem}") from problem
    if digest is not None and sha256(source).hexdigest() != digest:
        raise MethodFileRefused("file_changed", path)
    name = f"kvlens_method_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, path, source))
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
