"""Which files decide what a trial comes to: the sources a run of the method imports, followed from file to file, and
the data that lies beside them. Pages, reports and benches are not among them, since nothing that runs imports them."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from kvlens import PACKAGE

RUNNERS = ("kvlens.lab.bench.trials", "kvlens.studies.trialplan", "kvlens.studies.unstored")
"""what carries out a trial of a measurement that is no study, and of one that is"""
STATED = "kvlens.methods.statements"
"""what a paper says of a method: no part of what runs"""
DATA = (".json", ".safetensors", ".txt")
"""kinds of files that sources read: calibrations, routers, texts"""


def code(modules: Sequence[str], root: Path = PACKAGE) -> str:
    """16 hex digits over the files that decide trials of what is defined in `modules`, the method and the tasks, of the
    package at `root`."""
    whole = hashlib.sha256()
    for path in deciding(modules, root):
        whole.update(path.name.encode() + hashlib.sha256(running(path)).digest())
    return whole.hexdigest()[:16]


def deciding(modules: Sequence[str], root: Path = PACKAGE) -> tuple[Path, ...]:
    """The files, in order. A source that is imported at any depth counts, inside a function too; so do the packages
    around it and the data files beside it. A method outside the repository counts with what it imports of its own
    package."""
    own_value = {name.partition(".")[0] for name in modules}
    paths_by_key: dict[str, Path] = {}
    waiting = [*RUNNERS, *modules]
    while waiting:
        name = waiting.pop()
        if name in paths_by_key or name == STATED or (path := _file(name, own_value, root)) is None:
            continue
        paths_by_key[name] = path
        waiting += [*_packages(name), *_imported(path, name)]
    sources = set(paths_by_key.values())
    data = {path for folder in {path.parent for path in sources} for path in folder.iterdir() if path.suffix in DATA}
    return tuple(sorted(sources | data))


def running(path: Path) -> bytes:
    """What of a file can decide a trial: of a source all but what a method's paper says of it, which nothing that runs
    looks at."""
    data = path.read_bytes()
    if path.suffix != ".py" or STATED.encode() not in data:
        return data
    lines = data.splitlines(keepends=True)
    for node in ast.walk(ast.parse(data)):
        if isinstance(node, ast.Assign):
            sentences = [ast.unparse(target) for target in node.targets] == ["statements"]
        elif isinstance(node, ast.ImportFrom):
            sentences = node.module == STATED
        else:
            continue
        if sentences:
            end = node.end_lineno or node.lineno
            lines[node.lineno - 1 : end] = [b""] * (end - node.lineno + 1)
    return b"".join(lines)


def _file(name: str, own_keys: set[str], root: Path) -> Path | None:
    """The source of a module of kvlens or of a package in `own_keys`; None: somebody else's, or no module."""
    top, *rest = name.split(".")
    if top == "kvlens":
        place = root.joinpath(*rest)
        return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
    if top not in own_keys:
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _packages(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts)))


def _imported(path: Path, name: str) -> frozenset[str]:
    """Full names that a source imports; `from a import b` counts as a and as a.b."""
    return _named(path, path.stat().st_mtime_ns, name if path.name == "__init__.py" else name.rpartition(".")[0])


@cache
def _named(path: Path, changed_ns: int, package: str) -> frozenset[str]:
    """Of a source of `package`. `changed_ns` only makes a changed file another entry of the cache."""
    names: set[str] = set()
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            written = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(written, package) if node.level else written
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a source that can run: imports for type checkers are left out."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from _nodes(child)
