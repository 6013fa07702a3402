"""Which tests need no run since nothing that they prove has changed: `python tests/proved.py skip`, `types`, `write` or
`show`.

A group of tests is proved for a digest: of the sources it proves, its own files, and the tested versions. `make
test-all` runs every group and then writes the digests to tests/proved.json, which is committed. `make test`, and so CI,
leaves out a group whose digest is the committed one, says so, and runs a group of any other digest.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "proved.json"


@dataclass(frozen=True)
class Group:
    """Test files, and the sources whose change runs them again; glob patterns relative to the repository. `core`: CORE,
    of which files below the folders `without` are no sources."""

    tests: tuple[str, ...]
    sources: tuple[str, ...]
    core: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def files(self, root: Path = ROOT) -> list[Path]:
        """Return the test files, in order."""
        return _matches(self.tests, root)

    def covered(self, root: Path = ROOT) -> list[Path]:
        """Return the test files and the sources, in order: a change of any runs the tests again."""
        core = [path for path in _matches(self.core, root) if not _name(path, root).startswith(self.without)]
        return sorted({*_matches((*self.tests, *self.sources), root), *core})

    def digest(self, root: Path = ROOT) -> str:
        """Return the SHA-256 of all names and contents."""
        total = hashlib.sha256()
        for path in self.covered(root):
            total.update(_name(path, root).encode() + b"\0")
            total.update(hashlib.sha256(path.read_bytes()).digest())
        return total.hexdigest()


CORE = (
    "kvlens/**/*.py",
    "kvlens/**/*.toml",
    "kvlens/demo/weights/*",
    "kvlens/methods/**/*.json",
    "kvlens/methods/**/*.safetensors",
    "kvlens/player/web/*",
    "kvlens/tasks/corpus/*",
    "kvlens/trace/*.json",
    "kernels/**/*.py",
    "store/**/*.py",
    "tests/*.py",
    "pyproject.toml",
    "requirements*.txt",
)
"""code and data of what runs models; the app is left out, and the lab where no test of a group runs it"""
APP, LAB, GPU = "kvlens/app/", "kvlens/lab/", "kvlens/lab/gpu/"

GROUPS = {
    "kernels": Group(
        ("tests/kernels/test_*.py",),
        (
            "kernels/**/*.py",
            "kvlens/lab/gpu/**/*.py",
            "kvlens/memory/*.py",
            "kvlens/link/*.py",
            "tests/kernels/*.py",
            "tests/interpreted.py",
            "tests/lowrank_unit.py",
            "requirements*.txt",
            "docs/evidence/kernels.md",
        ),
    ),
    "device": Group(
        ("tests/static/test_*.py", "tests/unit/test_bench_gpu*.py"), ("kvlens/lab/results/*.json*",), CORE, (APP,)
    ),
    # Code of README, docs and notebooks, and the sample prompt, on the real model.
    "examples": Group(
        (
            "tests/api/test_notebooks.py",
            "tests/api/test_first_example.py",
            "tests/unit/test_readme_runs.py",
            "tests/unit/test_smollm2.py",
        ),
        ("README.md", "docs/api.md", "notebooks/*.ipynb", "tests/api/conftest.py"),
        CORE,
        (APP, LAB),
    ),
    # How runs are carried out: studies, workers, gates, races, kept readings.
    "carrying": Group(
        (
            "tests/unit/test_gate.py",
            "tests/unit/test_passage.py",
            "tests/unit/test_race.py",
            "tests/unit/test_readings.py",
            "tests/unit/test_studies.py",
            "tests/unit/test_study_workers.py",
        ),
        ("docs/studies.md", "docs/architecture.md"),
        CORE,
        (APP, GPU),
    ),
    # Processes of the app: the one that jobs are forked from, and the soak, which opens pages.
    "processes": Group(
        ("tests/unit/test_warm.py", "tests/fault/test_soak.py"),
        (
            "benchmarks/soak*.py",
            "kvlens/app/**/*.css",
            "kvlens/app/**/*.html",
            "kvlens/app/**/*.js*",
            "kvlens/app/**/*.svg",
            "kvlens/lab/results/*.json*",
            "tests/fault/*.py",
            "tests/synthetic/*.py",
        ),
        CORE,
    ),
    # What mypy says of every file; with it the test that it sees across borders.
    "types": Group(
        ("tests/unit/test_types_border.py",),
        (
            "kvlens/**/*.py",
            "kernels/**/*.py",
            "store/**/*.py",
            "pages/*.py",
            "benchmarks/*.py",
            "app.py",
            "tests/api/typed_example.py",
            "pyproject.toml",
            "requirements*.txt",
        ),
    ),
    # Benchmarks, claims, training and calibration: tools of the lab.
    "lab": Group(
        (
            "tests/unit/test_bench_cli.py",
            "tests/unit/test_bench_rates.py",
            "tests/unit/test_*_calibration.py",
            "tests/unit/test_claims_parts.py",
            "tests/unit/test_freetext.py",
            "tests/unit/test_ledger_study.py",
            "tests/unit/test_mutations.py",
            "tests/unit/test_plugin_lies.py",
            "tests/unit/test_real_model_ratios.py",
            "tests/unit/test_sekv_training.py",
            "tests/unit/test_sweep.py",
            "tests/lens/test_explain.py",
        ),
        ("benchmarks/*.py", "benchmarks/*.toml", "kvlens/lab/results/*.json*", "tests/synthetic/*.py"),
        CORE,
        (APP,),
    ),
}


def _matches(patterns: tuple[str, ...], root: Path) -> list[Path]:
    return sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()})


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def proved(root: Path = ROOT) -> set[str]:
    """Return the groups that were proved as they are."""
    path = root / FILE.relative_to(ROOT)
    stored = json.loads(path.read_text()) if path.exists() else {}
    return {name for name, group in GROUPS.items() if stored.get(name, {}).get("digest") == group.digest(root)}


def skip() -> None:
    """Print pytest's arguments that leave out what is proved, and to stderr what is left out."""
    for name in sorted(proved()):
        files = GROUPS[name].files()
        print(f"Left out: {len(files)} files of {name}, unchanged since `make test-all` passed.", file=sys.stderr)
        print(*(f"--ignore={path.relative_to(ROOT)}" for path in files))


def types() -> None:
    """Print the target of the Makefile that checks types, unless they are proved; then say so on stderr."""
    if "types" in proved():
        print("Left out: types, unchanged since `make test-all` passed.", file=sys.stderr)
    else:
        print("types")


def write() -> None:
    """Note that all groups passed as they are now."""
    today = datetime.now(UTC).date().isoformat()
    digests = {name: {"digest": group.digest(), "date": today} for name, group in sorted(GROUPS.items())}
    FILE.write_text(json.dumps(digests, indent=1) + "\n")


def show() -> None:
    """Print every group and whether it is proved."""
    done = proved()
    for name, group in GROUPS.items():
        print(f"{name}: {len(group.files())} files, {'proved' if name in done else 'to run'}")


if __name__ == "__main__":
    {"skip": skip, "types": types, "write": write, "show": show}[sys.argv[1]]()
