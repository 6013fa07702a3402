"""Every command and every block of code in README.md runs: here, or in the test that is named for it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from readmetext import README, ROOT, blocks, inline_commands, make_targets, shell_lines
from warmprocess import WarmProcess

from kvlens import methods

ELSEWHERE = {
    'pip install "kvlens[app]"': "tests/unit/test_packaging.py",
    "kvlens app": "tests/unit/test_app_command.py",
    "make app": "tests/uiserver.py",
    "make test": ".ci/run",
}
"""command -> the file that runs it"""
METHOD = "short_keys"


def commands() -> list[str]:
    """Return the commands of README that run here, in its order."""
    return [line for line in shell_lines() if line not in ELSEWHERE]


def python_blocks() -> tuple[str, str]:
    """Return the block that uses the API and the block that defines a method."""
    api, method = [block.text for block in blocks() if block.language == "python"]
    return api, method


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with README's method as an installed package."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my_method.py").write_text(python_blocks()[1], encoding="utf-8")
    name = re.search(r"^class (\w+)", python_blocks()[1], flags=re.MULTILINE)
    assert name is not None
    information = folder / "my_method-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-method\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[kvlens.methods]\n{METHOD} = my_method:{name.group(1)}\n")
    return folder


@pytest.fixture(scope="module")
def warm(folder: Path) -> Iterator[WarmProcess]:
    """A process that forks one process for each command."""
    with WarmProcess(folder) as process:
        yield process


def carried_out(warm: WarmProcess, folder: Path, line: str) -> list[str]:
    """Run a command in the folder and return its lines on stdout. It has to end with status 0."""
    ended = warm.kvlens(folder, f"import os; os.chdir({str(folder)!r})", *shlex.split(line)[1:])
    assert ended.returncode == 0, f"{line}: {ended.stderr[-2000:]}"
    return ended.stdout.splitlines()


def test_the_commands_run_one_after_the_other(warm: WarmProcess, folder: Path) -> None:
    uid, files = "", set()
    for line in commands():
        program = line.split()[0]
        assert program == "kvlens", f"no test runs `{line}`"
        assert "UID" not in line or uid
        printed = carried_out(warm, folder, line.replace("UID", uid))
        if line.startswith("kvlens run "):
            uid = printed[-1]
        files |= set(re.findall(r"--out (\S+)", line))
    assert uid
    assert {"prompt.json", "report.html"} <= files
    assert all((folder / name).stat().st_size > 100 for name in files)


def test_the_method_of_the_readme_runs_by_its_name(warm: WarmProcess, folder: Path) -> None:
    carried_out(warm, folder, "kvlens prompt --model demo --length 256 --json --out small.json")
    printed = carried_out(warm, folder, f"kvlens run small.json --model demo --method {METHOD} --budget 60%")
    shown = "\n".join(carried_out(warm, folder, f"kvlens runs show {printed[-1]} --json"))
    assert f'"{METHOD}"' in shown


def test_the_method_of_the_readme_has_fifteen_lines_at_most() -> None:
    lines = python_blocks()[1].splitlines()
    assert len([line for line in lines if line]) <= 15


def test_the_python_of_the_readme_runs_and_brings_the_answer_back(tmp_path: Path) -> None:
    api = python_blocks()[0]
    assert len([line for line in api.splitlines() if line]) <= 8
    code = f"import os; os.environ.pop('DISPLAY', None)\n{api}\nprint(hold.restored)\n"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(Path.home()), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1] == "True"
    assert (tmp_path / "replay.html").stat().st_size > 10_000


def test_what_runs_elsewhere_has_its_file_and_its_target() -> None:
    lines = shell_lines()
    assert set(ELSEWHERE) <= set(lines)
    assert [file for file in ELSEWHERE.values() if not (ROOT / file).is_file()] == []
    targets = {line.split()[1] for line in [*lines, *inline_commands()] if line.startswith("make ")}
    assert targets <= make_targets()
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    recipe = subprocess.run(["make", "-n", "app"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert recipe.splitlines()[-1].endswith("streamlit run app.py")


def test_the_page_is_short_and_its_links_lead_somewhere() -> None:
    text = README.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 160
    assert text.index("![") < text.index("```")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_table_of_restored_answers_is_of_the_committed_figures() -> None:
    file = ROOT / "kvlens/lab/results/explain-smollm2-kinds-10.json"
    measured = json.loads(file.read_text(encoding="utf-8"))
    every = measured["pooled"]["all"]
    groups = {methods.get(line["method"]).title: line for line in measured["lines"]} | {"all": every}
    restored = {
        name: [round(group["arms"][f"shown_top{top}"]["share"] * group["n"]) for top in (5, 20)] + [group["n"]]
        for name, group in groups.items()
    }
    lines = README.read_text(encoding="utf-8").splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| restored |"))
    names, cells = ([cell.strip() for cell in lines[place].split("|")[2:-1]] for place in (start, start + 2))
    figures = [[int(number) for number in re.findall(r"\d+", cell)] for cell in cells]
    assert dict(zip(names, figures, strict=True)) == restored
    assert measured["about"]["masses"] == "full KV"
    assert every["arms"]["random5"]["share"] == 0
