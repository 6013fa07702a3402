"""What the kernels may know, and that a machine without a GPU does not load Triton for them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import torch

from kvlens import PACKAGE
from kvlens.kernels import choice
from kvlens.lab.gpu.part import kernel_files

ROOT = Path(__file__).resolve().parents[2]
KNOWN = {"math", "__future__", "concurrent", "dataclasses", "functools", "importlib", "os", "sys", "typing", "torch"}
ON_HOST = {"zone_host.py": {"numpy"}}
"""what files know besides that run on the host alone: the plan of recalls beside its reference in torch"""


def test_kernels_know_tensors_only() -> None:
    found = []
    for path in kernel_files():
        above = path.parent != PACKAGE / "kernels"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found += [
                f"{path.name} imports {n}"
                for n in names
                if n.split(".")[0] not in KNOWN | ON_HOST.get(path.name, set())
                and not n.startswith("kvlens.kernels")
                and not (above and n.startswith("kvlens.lab.gpu.kernels"))
            ]
    assert found == []


def test_no_triton_where_torch_has_no_cuda() -> None:
    """In a process of its own: every kernel module is imported and works on CPU tensors."""
    modules = [".".join(("kvlens", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in kernel_files()]
    code = f"""
import importlib, sys, torch
for name in {modules}:
    importlib.import_module(name)
from kvlens.kernels.merge import merge
merge(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.float32)
print("triton" in sys.modules)"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.strip() == str(torch.backends.cuda.is_built()), done.stderr[-2000:]


def test_the_choice_goes_by_the_device_alone() -> None:
    assert choice.backend(torch.zeros(1)) == "torch"
    assert choice.backend(torch.zeros(1, device="meta")) == "torch"
