"""What is importable from where, and that the types are seen across every border of the package."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = {
    "kvlens/kernels": "kernels",
    "kvlens/store": "store",
    "kvlens/app/pages": "pages",
    "kvlens/app/entry.py": "app.py",
    ".streamlit/config.toml": "kvlens/app/config.toml",
    "pages/.streamlit/config.toml": "kvlens/app/config.toml",
    "kvlens/app/.streamlit/config.toml": "kvlens/app/config.toml",
}
"""link -> what it leads to: the top of the repository as Streamlit wants it, and the package as pip wants it"""


def test_links_lead_to_the_top_of_the_repository() -> None:
    for link, target in LINKS.items():
        assert (ROOT / link).is_symlink(), link
        assert (ROOT / link).resolve() == ROOT / target


@pytest.mark.parametrize("name", ["kvlens.pip", "kvlens.torch", "kvlens.tests", "kvlens.benchmarks"])
def test_the_package_holds_no_foreign_modules(name: str) -> None:
    assert importlib.util.find_spec(name) is None


def test_the_core_needs_neither_streamlit_nor_plotly() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {name for line in project["dependencies"] if (name := _name(line))}
    extras = {extra: {_name(line) for line in lines} for extra, lines in project["optional-dependencies"].items()}
    assert {"streamlit", "plotly", "umap-learn"} <= extras["app"]
    assert core.isdisjoint(extras["app"])
    assert set(extras) == {"app", "lab", "gpu", "ray", "dev"}
    pinned = {
        _name(line) for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"
    }
    assert pinned == core | extras["app"], "the tested set is what the core and the app need"


def _name(requirement: str) -> str:
    """Return the distribution that a requirement names."""
    return (
        requirement.partition(";")[0].split("[")[0].split("=")[0].rstrip("<>=!~ ").split(">")[0].split("<")[0].strip()
    )


def test_every_core_command_works_without_the_apps_packages(tmp_path: Path) -> None:
    """Streamlit, Plotly and UMAP cannot be imported in this process: commands that need none work, others name the
    extra."""
    (tmp_path / "prompt.txt").write_text("Paris is the capital of France.", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_APP],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    statuses = json.loads(ended.stdout.splitlines()[-1])
    assert statuses == [0, 0, 0, 0, 0, 1, 1], ended.stderr
    refusals = [line for line in ended.stderr.splitlines() if line.startswith("kvlens: missing_extra: ")]
    assert ["pip install 'kvlens[app]'" in line for line in refusals] == [True, True]


WITHOUT_APP = """
import json, sys
for name in ("streamlit", "starlette", "plotly", "umap"):
    sys.modules[name] = None
from kvlens.cli.main import main

def status(*arguments):
    sys.argv = ["kvlens", *arguments]
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    return 0

print(json.dumps([
    status("methods"),
    status("gallery", "snapkv"),
    status("run", "prompt.txt", "--model", "demo", "--max-new", "2"),
    status("bench", "tasks"),
    status("runs"),
    status("app", "--port", "59999"),
    status("report", "20260101-000000-abcdef", "--out", "x.html"),
]))
"""
