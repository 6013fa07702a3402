"""Every kernel compiles for A100 and H100 without a GPU, fits, does not spill, and is what evidence/kernels.md says it
is."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from kvlens.kernels import page_attend
from kvlens.lab.gpu import aot
from kvlens.lab.gpu.part import kernel_files

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "evidence" / "kernels.md").read_text(encoding="utf-8")
REWRITE = "run: python -m kvlens.lab.gpu.aot --write docs/evidence/kernels.md"

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory one program may have (CUDA C++ programming guide, table of compute capabilities)."""


@pytest.fixture
def interpreter() -> None:
    """Nothing is interpreted here."""


def jitted() -> set[str]:
    """Every kernel, without the helpers that kernels call."""
    found, called = set(), set()
    for path in kernel_files():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", None) == "jit" for d in node.decorator_list):
                found.add(f"{path.stem}.{node.name}")
                called |= {
                    part.func.id
                    for part in ast.walk(node)
                    if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
                }
    return {name for name in found if name.split(".")[1] not in called}


Figures = tuple[int, int, int]
"""registers, spilled bytes, bytes of shared memory"""


def documented() -> dict[tuple[str, str, int], dict[int, Figures]]:
    """(kernel, case, warps) -> architecture -> figures, from the table of docs/evidence/kernels.md."""
    found: dict[tuple[str, str, int], dict[int, Figures]] = {}
    for line in PAGE.split(aot.MARKS[0])[1].split(aot.MARKS[1])[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith("`"):
            numbers = [int(cell) for cell in cells[2:]]
            found[cells[0].strip("`"), cells[1], numbers[0]] = {
                arch: tuple(numbers[1 + 3 * place : 4 + 3 * place]) for place, arch in enumerate(aot.ARCHITECTURES)
            }
    return found


def heaviest(arch: int) -> dict[str, tuple[str, str, int]]:
    """Kernel -> the row of the table that takes the most registers there, and of those the most shared memory."""
    rows = documented()
    order = sorted(rows, key=lambda row: (rows[row][arch][0], rows[row][arch][2]))
    return {row[0]: row for row in order}


COMPILE = """
import dataclasses, json, sys
from kvlens.lab.gpu import aot
made = [aot.compile_all((int(arch),), only=cases) for arch, cases in json.loads(sys.argv[1]).items()]
print(json.dumps([dataclasses.asdict(binary) for each in made for binary in each]))
"""


def test_the_table_is_of_these_kernels_and_none_spills() -> None:
    """Every case, since it is renewed by compiling them all."""
    assert f"sources {aot.sources()};" in PAGE, REWRITE
    assert {figures[1] for row in documented().values() for figures in row.values()} == {0}


@pytest.mark.slow
def test_kernels_compile_without_spilling() -> None:
    """Of every kernel the case that asks most, for A100 and for H100."""
    asked = {arch: heaviest(arch) for arch in SHARED}
    only = json.dumps({arch: [case for _, case, _ in rows.values()] for arch, rows in asked.items()})
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, only],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    binaries = [aot.Binary(**each) for each in json.loads(done.stdout)]
    assert {(b.kernel, b.arch) for b in binaries} == {(kernel, arch) for kernel in jitted() for arch in SHARED}
    assert [b for b in binaries if b.spilled] == []
    assert [b for b in binaries if not 0 < b.registers <= 255 or b.shared > SHARED[b.arch]] == []
    if f"triton {triton.__version__}," in PAGE:  # another compiler, as CUDA builds of torch bring, makes other binaries
        found = {(b.arch, (b.kernel, b.case, b.warps)): (b.registers, b.spilled, b.shared) for b in binaries}
        for arch, rows in asked.items():
            for row in rows.values():
                assert found[arch, row] == documented()[row][arch], REWRITE


def test_the_table_takes_its_place_in_the_page() -> None:
    """Written from the figures it shows, it is the table that stands there."""
    binaries = [
        aot.Binary(kernel, case, arch, warps, *figures)
        for (kernel, case, warps), each in documented().items()
        for arch, figures in each.items()
    ]
    before, _, rest = PAGE.partition(aot.MARKS[0])
    _, _, after = rest.partition(aot.MARKS[1])
    rows = [line for line in aot.table(binaries).splitlines() if line.startswith("|")]
    assert rows == [line for line in rest.splitlines() if line.startswith("|")][: len(rows)]
    assert aot.with_table(PAGE, "table") == f"{before}{aot.MARKS[0]}\ntable\n{aot.MARKS[1]}{after}"


def test_interpreted_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "INTERPRET", True)
    with pytest.raises(SystemExit, match="TRITON_INTERPRET"):
        aot.main()


def test_what_spills_is_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = aot.Binary("page_attend_kernels.split", "D 128", 90, 4, 255, 0, 1024)
    monkeypatch.setattr(aot, "INTERPRET", False)
    monkeypatch.setattr(sys, "argv", ["aot", "--json", "--arch", "90"])
    for spilled in (0, 8):
        monkeypatch.setattr(aot, "compile_all", lambda found, n=spilled: [replace(made, spilled=n)])
        assert aot.main() == int(spilled > 0)
        assert json.loads(capsys.readouterr().out)[0]["spilled"] == spilled


LOOK = """
import json, re
from types import SimpleNamespace
from kvlens.lab.gpu import aot
seen = []
def keep(kernel, label, arch, compiled):
    text = compiled.asm["ttgir"]
    if kernel.__name__ == "split":
        tiles = re.findall(r"memdesc<(\\d+)x64x128xbf16", "".join(re.findall(r".*local_alloc : .*", text)))
        seen.append((label, tiles, re.findall(r"async_wait .*?num = (\\d+)", text)))
aot._read = keep
aot.compile_all((90,), {"D 128, page 32, bf16, bare", "D 128, page 32, bf16, bias, mass"})
print(json.dumps(seen))
"""


def test_k1_fetches_keys_and_values_ahead() -> None:
    """In the compiled loop there is room for two tiles of keys and two of values, and a tile is multiplied while others
    are on their way. With the table read in the same iteration there was one of each at any number of stages."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    looked = json.loads(done.stdout)
    assert len(looked) == 2
    for label, tiles, waits in looked:
        assert tiles == [str(page_attend.STAGES - 1)] * 2, label
        assert max(map(int, waits)) > 0, label
