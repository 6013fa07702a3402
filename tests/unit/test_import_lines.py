"""The one direction of imports (docs/evidence/design.md): who may know whom, read from the sources and tried in a fresh
process."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from kvlens import methods

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "umap")

ROOMS: tuple[tuple[str, ...], ...] = (
    ("refusal",),
    # the ground: typed rows, shapes, texts and numbers in words, and the toy model's language
    ("rows", "decisions", "instruments", "metaparts", "meta", "shape", "text", "intervals", "shortage", "files"),
    ("records", "budget"),
    ("holds", "finer"),
    ("plugins", "interrupts", "hangs", "collecting", "storeys", "callpackage", "demo", "statistics", "workers"),
    ("models",),
    ("spans",),
    ("kernels",),
    ("link", "quantised"),
    ("tiers",),
    ("memory",),
    ("methods",),
    ("recording",),
    ("engine",),
    ("store",),
    ("tasks",),
    ("checking",),
    ("runs",),
    ("lens", "observing"),
    ("studies",),
    ("tables", "ledger"),
    ("player", "trace"),
    ("api",),
    ("cli", "__main__"),
    # the lab
    ("lab.results",),
    ("lab.tasks", "lab.calibrate", "lab.training"),
    ("lab.bench", "lab.gpu"),
    ("lab.claims",),
    ("lab.studies",),
    ("lab.commands",),
    # the app
    ("app.compare", "app.data", "app.figures", "app.gallery"),
    ("app.report",),
    ("app.ui",),
    ("app.entry",),
    ("app.methods", "app.commands"),
)
"""docs/evidence/design.md: a file imports from its own room and from those above it in this list"""
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}


def modules() -> dict[str, Path]:
    """Full name of every module of the product -> its file."""
    found = {}
    for folder, package in (("kvlens", "kvlens"), ("kernels", "kvlens.kernels"), ("store", "kvlens.store")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


MODULES = modules()


@cache
def arrows() -> dict[str, set[str]]:
    """Module -> the product's modules it imports, at whatever depth of the file the import stands."""
    found: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        mine = found[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                mine |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert not node.level, f"{name} imports by dots"
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                mine |= {full if full in MODULES else node.module for full in whole}
        mine &= set(MODULES) - {name}
    return found


def room(module: str) -> str | None:
    """The room a module counts with; None: the package itself."""
    parts = module.split(".")
    if len(parts) == 1 or module in ("kvlens.lab", "kvlens.app"):
        return None
    return ".".join(parts[1:3]) if parts[1] in ("lab", "app") else parts[1]


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules each of which leads to every other (strongly connected components of two and more)."""

    def reached(start: str, edges: dict[str, set[str]]) -> set[str]:
        found, left = {start}, [start]
        while left:
            for step in edges[left.pop()] - found:
                found.add(step)
                left.append(step)
        return found

    back: dict[str, set[str]] = {name: set() for name in graph}
    for name, targets in graph.items():
        for target in targets:
            back[target].add(name)
    seen: set[str] = set()
    found = []
    for name in graph:
        if name not in seen:
            same = reached(name, graph) & reached(name, back)
            seen |= same
            found += [same] if len(same) > 1 else []
    return found


def test_every_file_stands_in_a_room() -> None:
    assert {name for name in MODULES if room(name) is not None and room(name) not in RANK} == set()


def test_no_import_runs_back_up_between_rooms() -> None:
    up = [
        f"{name} ({room(name)}) imports {target} ({room(target)})"
        for name, targets in arrows().items()
        for target in targets
        if (of := room(name)) is not None and (to := room(target)) is not None and RANK[to] > RANK[of]
    ]
    assert sorted(up) == []


def test_no_circle_and_no_arrow_up_between_folders() -> None:
    """What a newcomer sees: folders directly in kvlens/, kvlens/lab/ and kvlens/app/."""
    graph: dict[str, set[str]] = {}
    for name, targets in arrows().items():
        home = room(name) or ""
        graph.setdefault(home, set()).update({room(target) or "" for target in targets} - {home, ""})
    assert circles({home: targets & set(graph) for home, targets in graph.items() if home}) == []
    up = [
        f"{home} imports {target}"
        for home, targets in graph.items()
        for target in targets
        if storey(target) > storey(home)
    ]
    assert sorted(up) == []


def storey(home: str) -> int:
    """0 for a room of the core, 1 of the lab, 2 of the app."""
    return 2 if home.startswith("app.") else 1 if home.startswith("lab.") else 0


def test_no_import_circle_between_files() -> None:
    graph = {**arrows(), "kvlens": set()}  # the package imports its API when a name is used (tests/api/test_run.py)
    assert [sorted(circle) for circle in circles(graph)] == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_one_page_does_not_look_into_another() -> None:
    """A page's folder is its own; what two pages use lies in ui/common. A method's view belongs to the Method page."""

    def page(module: str) -> str | None:
        if module.startswith("kvlens.app.ui."):
            return module.split(".")[3]
        return "method" if room(module) == "app.methods" else None

    across = [
        f"{name} imports {target}"
        for name, targets in arrows().items()
        for target in targets
        if page(name) is not None and page(target) is not None and page(target) not in ("common", page(name))
    ]
    assert sorted(across) == []


def test_no_shared_file_names_a_method() -> None:
    """Only the line that registers a method names it outside its folder; docs, tests and results may."""
    # the control's name is a word, and the module of Python that draws numbers
    names = [name for name, path in methods.BUILT_IN.items() if name not in (methods.REFERENCE, "random")]
    homes = {name: methods.BUILT_IN[name].partition(":")[0].replace(".", "/") for name in names}
    named = re.compile(rf"(?<![A-Za-z])(?i:{'|'.join(names).replace('_', '[ _]?')})(?![a-z]|[A-Z]{{2}})")
    told = []
    for path in [*MODULES.values(), *sources("pages/*.py", "app.py")]:
        place = path.relative_to(ROOT).as_posix()
        own = any(
            place.startswith(home.removesuffix("/method") + end) for home in homes.values() for end in ("/", ".py")
        )
        own = own or any(serves(place, name) for name in names)
        if own or place == "kvlens/methods/__init__.py" or place.startswith("kvlens/lab/studies/"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            told += [f"{place}:{number}: {line.strip()}"] if named.search(line) else []
    assert told == []


def serves(place: str, name: str) -> bool:
    """Whether a file is a part of the method: in a room's folder `methods` by its name, or in its trainer's folder."""
    folder, _, file = place.rpartition("/")
    part = folder.endswith("/methods") and re.fullmatch(rf"{name}(_\w+)?\.py", file) is not None
    return part or folder.endswith(f"/training/{name}")


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


def test_figures_know_neither_streamlit_nor_sql_nor_the_store() -> None:
    banned = ("streamlit", "duckdb", "kvlens.store", "kvlens.app.ui", "kvlens.engine.engine", *HEAVY)
    assert offences(sources("kvlens/app/figures/**/*.py"), banned) == []


def test_pages_know_the_interface_the_figures_and_the_reader_only() -> None:
    allowed = ("kvlens.app.ui", "kvlens.app.figures", "kvlens.store.reader")
    found = [
        f"{path.name} imports {name}"
        for path in sources("pages/*.py", "app.py")
        for name in imported(path)
        if name.startswith("kvlens") and not name.startswith(allowed)
    ]
    assert found == []


def test_pages_are_thin() -> None:
    assert {path.name: n for path in sources("pages/*.py") if (n := len(path.read_text().splitlines())) > 120} == {}


LONGER = {
    "kvlens/trace/writer.py": 300,
    "kernels/page_attend.py": 282,
    "kvlens/lab/gpu/tier.py": 254,
    "kvlens/lab/gpu/kernels/arrivals.py": 269,
}
"""lines of files that may have more than MOST_LINES: the writer of the open format is one file that people copy, and a
kernel is one function"""
MOST_LINES = 250


def test_no_file_is_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources("kvlens/**/*.py", "kernels/*.py", "store/*.py", "pages/*.py")
    }
    assert len(lengths) > 900
    assert {name: lines for name, lines in lengths.items() if lines > LONGER.get(name, MOST_LINES)} == {}


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports a test file by its name, so that one process cannot collect both."""
    names = Counter(path.name for path in sources("tests/**/test_*.py"))
    assert len(names) > 300
    assert [name for name, n in names.items() if n > 1] == []


def test_the_interface_imports_no_engine() -> None:
    banned = (
        *HEAVY,
        "duckdb",
        "kvlens.engine.engine",
        "kvlens.engine.models",
        "kvlens.engine.session",
        "kvlens.recording.recorder",
    )
    assert offences(sources("kvlens/app/ui/**/*.py", "pages/*.py", "app.py"), banned) == []


def test_the_engine_knows_no_database_and_no_interface() -> None:
    files = sources(
        "kvlens/engine/*.py",
        "kvlens/recording/recorder.py",
        "kvlens/memory/*.py",
        "kvlens/tiers/*.py",
        "kvlens/link/*.py",
        "kvlens/quantised/*.py",
        "kvlens/holds.py",
        "kvlens/lens/trials.py",
        "kvlens/lens/search.py",
    )
    assert offences(files, ("duckdb", "pyarrow", "pandas", "streamlit", "kvlens.store", "kvlens.app.ui")) == []


def test_the_core_knows_nothing_of_what_only_a_gpu_runs() -> None:
    """The bench of GPUs, its figures and its page know it, and what a method says to that bench (`gpu.py`)."""
    files = sources(
        "kvlens/engine/*.py",
        "kvlens/memory/*.py",
        "kvlens/tiers/*.py",
        "kvlens/link/*.py",
        "kvlens/quantised/*.py",
        "kvlens/recording/*.py",
        "kvlens/runs/*.py",
        "kvlens/lens/*.py",
        "kvlens/spans/*.py",
        "kernels/*.py",
        "store/*.py",
        "kvlens/methods/**/*.py",
    )
    assert offences([path for path in files if path.name != "gpu.py"], ("kvlens.lab.gpu",)) == []


def test_methods_touch_no_files() -> None:
    """What decides in a run reads nothing: kvlens.methods.calibration reads for it."""
    files = [path for name, path in MODULES.items() if room(name) == "methods"]
    banned = ("duckdb", "streamlit", "kvlens.store", "kvlens.app.ui", "shutil", "subprocess", "socket", "requests")
    assert offences(files, banned) == []
    reads = re.compile(r"\bopen\((?!self)|read_text|read_bytes|load_file|json\.load")
    readers = {path.name for path in files if reads.search(path.read_text(encoding="utf-8"))}
    assert readers == {"calibration.py"}


def test_the_store_knows_no_torch_and_no_interface() -> None:
    assert (
        offences(
            sources("store/*.py"), ("streamlit", "kvlens.app.ui", "kvlens.app.figures", "kvlens.engine.engine", *HEAVY)
        )
        == []
    )


def test_a_fresh_process_loads_no_heavy_library() -> None:
    code = f"""
import sys, kvlens.app.ui.common.data, kvlens.app.ui.replay.details, kvlens.app.ui.common.frame
import kvlens.app.ui.heads.view, kvlens.app.ui.run.preflight
import kvlens.app.ui.common.submit
import kvlens.app.ui.spans.table, kvlens.app.ui.spans.map, kvlens.app.data.spanmap
kvlens.app.ui.common.data.methods.catalogue()
print([name for name in {HEAVY} if name in sys.modules])"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stderr[-2000:]
