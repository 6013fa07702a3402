"""The one direction of imports (docs/design.md): who may know whom, read from the sources and tried in a fresh
process."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from kvlens.methods import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "umap")


def imported(path: Path) -> set[str]:
    """Full names of the modules a file imports at any depth, `from a import b` counted as both a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def offences(files: list[Path], banned: tuple[str, ...]) -> list[str]:
    assert files
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in sorted(imported(path))
        if any(name == ban or name.startswith(f"{ban}.") for ban in banned)
    ]


def sources(*patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def knots() -> list[list[str]]:
    """Groups of files that import each other in a circle, at whatever depth of the file the import stands."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources("kvlens/**/*.py")
    }
    files |= {f"kvlens.{path.parent.name}.{path.stem}": path for path in sources("store/*.py", "kernels/*.py")}
    knows = {name: modules(imported(path), files) - {name} for name, path in files.items()}
    reach = {name: closure(name, knows) for name in files}
    circles = {frozenset({name, *(other for other in reach[name] if name in reach[other])}) for name in files}
    return sorted(sorted(circle) for circle in circles if len(circle) > 1)


def modules(names: set[str], files: dict[str, Path]) -> set[str]:
    """Those names that are files; a package only where something of its own is meant, not one of its files."""
    found = names & files.keys()
    return {n for n in found if not any(f"{n}.{rest}" in files for rest in tails(n, names))}


def tails(package: str, names: set[str]) -> list[str]:
    return [name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")]


def closure(name: str, knows: dict[str, set[str]]) -> set[str]:
    found, waiting = set(), list(knows[name])
    while waiting:
        if (other := waiting.pop()) not in found:
            found.add(other)
            waiting += knows[other]
    return found


def test_no_file_is_part_of_an_import_circle() -> None:
    links = ["kvlens.memory.cudalink", "kvlens.memory.link"]  # one interface and its choice of links
    assert [circle for circle in knots() if circle != links] == []


def test_figures_know_neither_streamlit_nor_sql_nor_the_store() -> None:
    banned = ("streamlit", "duckdb", "kvlens.store", "kvlens.ui", "kvlens.engine.engine", *HEAVY)
    assert offences(sources("kvlens/figures/**/*.py"), banned) == []


def test_pages_know_the_interface_the_figures_and_the_reader_only() -> None:
    allowed = ("kvlens.ui", "kvlens.figures", "kvlens.store.reader")
    found = [
        f"{path.name} imports {name}"
        for path in sources("pages/*.py", "app.py")
        for name in imported(path)
        if name.startswith("kvlens") and not name.startswith(allowed)
    ]
    assert found == []


def test_pages_are_thin() -> None:
    assert {path.name: n for path in sources("pages/*.py") if (n := len(path.read_text().splitlines())) > 120} == {}


def test_the_interface_imports_no_engine() -> None:
    banned = (
        *HEAVY,
        "duckdb",
        "kvlens.engine.engine",
        "kvlens.engine.models",
        "kvlens.engine.session",
        "kvlens.recording.recorder",
    )
    assert offences(sources("kvlens/ui/**/*.py", "pages/*.py", "app.py"), banned) == []


def test_the_engine_knows_no_database_and_no_interface() -> None:
    files = sources(
        "kvlens/engine/*.py",
        "kvlens/recording/recorder.py",
        "kvlens/memory/*.py",
        "kvlens/memory/holds.py",
        "kvlens/lens/trials.py",
        "kvlens/lens/search.py",
    )
    assert offences(files, ("duckdb", "pyarrow", "pandas", "streamlit", "kvlens.store", "kvlens.ui")) == []


def test_the_core_knows_nothing_of_what_only_a_gpu_runs() -> None:
    """The bench of GPUs, its figures and its page know it, and what a method says to that bench (`gpu.py`)."""
    files = sources(
        "kvlens/engine/*.py",
        "kvlens/memory/*.py",
        "kvlens/recording/*.py",
        "kvlens/runs/*.py",
        "kvlens/lens/*.py",
        "kvlens/spans/*.py",
        "kernels/*.py",
        "store/*.py",
        "kvlens/methods/**/*.py",
    )
    assert offences([path for path in files if path.name != "gpu.py"], ("kvlens.gpu",)) == []


def test_neither_kernels_nor_what_a_gpu_runs_name_a_method() -> None:
    names = "|".join(name.partition("_")[0] for name in BUILT_IN if name != "full")
    found = [
        f"{path.relative_to(ROOT)} names {name}"
        for path in sources("kvlens/gpu/**/*.py", "kernels/*.py")
        for name in re.findall(f"(?<![a-z])(?:{names})(?![a-z])", path.read_text(encoding="utf-8").lower())
    ]
    assert found == []


def test_methods_touch_no_files() -> None:
    files = sources("kvlens/methods/*.py")
    assert (
        offences(
            files, ("duckdb", "streamlit", "kvlens.store", "kvlens.ui", "shutil", "subprocess", "socket", "requests")
        )
        == []
    )


def test_the_store_knows_no_torch_and_no_interface() -> None:
    assert (
        offences(sources("store/*.py"), ("streamlit", "kvlens.ui", "kvlens.figures", "kvlens.engine.engine", *HEAVY))
        == []
    )


def test_a_fresh_process_loads_no_heavy_library() -> None:
    code = f"""
import sys, kvlens.ui.common.data, kvlens.ui.replay.details, kvlens.ui.common.frame, kvlens.ui.heads.view
import kvlens.ui.run.preflight
import kvlens.ui.common.submit
import kvlens.ui.spans.table, kvlens.ui.spans.map, kvlens.runs.spanmap
kvlens.ui.common.data.methods.catalogue()
print([name for name in {HEAVY} if name in sys.modules])"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stderr[-2000:]
