"""What makes two trials comparable: the sources that decide them, found by what they import."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvlens import PACKAGE, methods
from kvlens.lab.bench import sweepfile
from kvlens.lab.bench.provenance import made_otherwise, origin
from kvlens.lab.bench.sources import code, deciding

DEMO = "kvlens.tasks.demo"


def modules(name: str) -> list[str]:
    return [methods.get(name).__module__, DEMO]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's sources with the data beside them."""
    root = tmp_path_factory.mktemp("package") / "kvlens"
    return Path(shutil.copytree(PACKAGE, root, ignore=shutil.ignore_patterns("__pycache__", "weights")))


def touched(root: Path, name: str) -> bool:
    """Whether a changed file makes trials of a method of the registry incomparable; the change is taken back."""
    path = root / name.removeprefix("kvlens/")
    before, was = code(modules("sekv"), root), path.read_bytes()
    path.write_bytes(was + b"\n# changed\n")
    try:
        return code(modules("sekv"), root) != before
    finally:
        path.write_bytes(was)


def test_a_copy_decides_as_the_repository_does(copy: Path) -> None:
    for name in methods.registry():
        assert code(modules(name), copy) == code(modules(name)), name


@pytest.mark.parametrize(
    "name",
    [
        "kvlens/engine/session.py",
        "kvlens/engine/loop.py",
        "kvlens/memory/memory.py",
        "kvlens/recording/measure.py",
        "kvlens/methods/base.py",
        "kvlens/methods/sekv/codec.py",
        "kvlens/tasks/demo.py",
        "kvlens/demo/tasks.py",
        "kvlens/methods/sekv/demo.safetensors",
        "kernels/attend.py",
        "kvlens/lab/bench/trials.py",
    ],
)
def test_a_file_that_decides_changes_the_origin(copy: Path, name: str) -> None:
    assert touched(copy, name)


@pytest.mark.parametrize(
    "name",
    [
        "kvlens/app/ui/replay/details.py",
        "kvlens/app/figures/memory.py",
        "kvlens/app/report/page.py",
        "kvlens/lab/commands/bench.py",
        "kvlens/lab/bench/quality.py",
        "kvlens/app/methods/sekv.py",
        "kvlens/lab/claims/methods/sekv.py",
        "kvlens/methods/streaming_llm/method.py",
        "kvlens/methods/chess/demo.json",
        "store/queries.py",
    ],
)
def test_a_page_a_bench_or_another_method_does_not(copy: Path, name: str) -> None:
    assert not touched(copy, name)


def test_a_method_outside_counts_with_its_own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "outside_method"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "method.py").write_text("import json\nfrom kvlens.memory import budget\nfrom .score import f\n")
    (package / "score.py").write_text("def f(): return 1\n")
    (package / "page.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = [path.name for path in deciding(["outside_method.method"]) if path.parent == package]
    assert own == ["__init__.py", "method.py", "score.py"]
    before = code(["outside_method.method"])
    (package / "score.py").write_text("def f(): return 2\n")
    assert code(["outside_method.method"]) != before


def test_an_origin_says_what_was_asked_and_what_code_answered() -> None:
    asked, by = origin("demo", "streaming_llm").split("-")
    assert origin("demo", "streaming_llm") == f"{asked}-{by}"
    again = origin("demo", "streaming_llm", 5).split("-")
    assert again[0] != asked
    assert again[1] == by


def row(origin: str, index: int, method: str = "full") -> dict[str, Any]:
    return {"task": "needle", "index": index, "method": method, "budget": "", "origin": origin}


def test_only_what_is_run_again_is_spoken_of() -> None:
    now = {"full": "a-1"}
    assert made_otherwise([row("a-1", 0), row("a-1", 1)], now) == ""
    assert made_otherwise([row("a-0", 0), row("a-1", 0)], now) == "", "it has been run again"
    line = made_otherwise([row("a-0", 0), row("a", 1), row("a-1", 2)], now)
    assert [word for word in line.split() if word.isdigit() or word == "full"] == ["2", "full", "1"]
    assert "\n" not in line


def test_committed_results_keep_the_origins_they_were_made_with() -> None:
    quality = json.loads((PACKAGE / "lab/results/quality-demo.json").read_text(encoding="utf-8"))
    grid = json.loads((PACKAGE / "lab/results/grid-demo.json").read_text(encoding="utf-8"))
    about, rows = sweepfile.parse(grid, "grid-demo.json")
    assert rows
    for origins in (quality["about"]["origins"], about["origins"]):
        assert set(origins) <= set(methods.registry())
        assert all(len(said.split("-")[0]) == 16 for said in origins.values())
