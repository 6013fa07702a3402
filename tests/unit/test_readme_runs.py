"""Commands and Python of README.md run, on the real model where they name none."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from readmetext import ROOT, commands, python_blocks
from warmprocess import WarmProcess, reading_environment

METHOD = "short_keys"


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


def test_the_python_of_the_readme_runs_and_brings_the_answer_back(tmp_path: Path) -> None:
    api = python_blocks()[0]
    assert len([line for line in api.splitlines() if line]) <= 8
    code = f"import os; os.environ.pop('DISPLAY', None)\n{api}\nprint(hold.restored)\n"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"} | reading_environment(ROOT),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1] == "True"
    assert (tmp_path / "replay.html").stat().st_size > 10_000
