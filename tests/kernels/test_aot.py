"""Every kernel compiles for A100 and H100 without a GPU, fits, does not spill, and is what docs/kernels.md says it
is."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory one program may have (CUDA C++ programming guide, table of compute capabilities)."""


@pytest.fixture
def interpreter() -> None:
    """Nothing is interpreted here."""


def jitted() -> set[str]:
    """Every kernel, without the helpers that kernels call."""
    found, called = set(), set()
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", None) == "jit" for d in node.decorator_list):
                found.add(f"{path.stem}.{node.name}")
                called |= {
                    part.func.id
                    for part in ast.walk(node)
                    if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
                }
    return {name for name in found if name.split(".")[1] not in called}


@pytest.mark.slow
def test_kernels_compile_without_spilling(tmp_path: Path) -> None:
    page = tmp_path / "kernels.md"
    documented = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    page.write_text(documented, encoding="utf-8")
    command = [sys.executable, "-m", "kvlens.kernels.aot", "--json", "--write", str(page)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr[-2000:]
    binaries = json.loads(done.stdout)
    assert {(b["kernel"], b["arch"]) for b in binaries} == {(kernel, arch) for kernel in jitted() for arch in SHARED}
    assert [b for b in binaries if b["spilled"]] == []
    assert [b for b in binaries if not 0 < b["registers"] <= 255 or b["shared"] > SHARED[b["arch"]]] == []
    assert done.returncode == 0
    assert page.read_text(encoding="utf-8") == documented, "run: python -m kvlens.kernels.aot --write docs/kernels.md"


def test_interpreted_kernels_are_not_compiled() -> None:
    command = [sys.executable, "-m", "kvlens.kernels.aot"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "TRITON_INTERPRET" in done.stderr
