"""`kvlens bench gpu` without a GPU: a dry run end to end, resuming, failures, the schema of the file."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlens.cli.main import main as kvlens_main
from kvlens.lab.gpu import ceilings, ledger, run
from kvlens.lab.gpu.__main__ import main as bare_main
from kvlens.lab.gpu.decode_parts import followers
from kvlens.lab.gpu.device import DryDevice
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.gpu.rates import read as read_rates
from kvlens.lab.gpu.report import MARKS, page, with_tables
from kvlens.lab.gpu.run import Request, measure
from kvlens.lab.gpu.schema import list_files, read
from kvlens.lab.gpu.settings import BASELINES, settings
from kvlens.lab.results.gpu import StepRow

pytestmark = pytest.mark.usefixtures("quick_gc")
ROOT = Path(__file__).resolve().parents[2]
QUICK = ("ceilings", "ledger", "headlines")
WHOLE = ("ceilings", "checks", "engine", "kernels", "decode 256", "recording", "ledger", "headlines")
"""all but what is compiled by torch.compile and swept: tests/unit/test_bench_gpu_decode.py"""


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger's part without the engine's runs, which `whole` has: it is done again and again here."""
    monkeypatch.setattr(ledger, "_engine", lambda bench: iter(()))


def dry(folder: Path, parts: tuple[str, ...] = QUICK, **more: Any) -> Request:
    return Request(folder, 10, parts, True, (256,), (1,), **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured by a process that finds torch and transformers, but nothing of pages, stores, and the command line's
    schemas: what a bare CUDA machine has. Where methods go through the engine, one of each family does: all of them do
    in tests/unit/test_bench_gpu_engine.py and, for the ledger, in tests/unit/test_bench_gpu_offload.py."""
    folder = tmp_path_factory.mktemp("gpu")
    code = f"""
import sys
class Hide:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ("duckdb", "streamlit", "plotly", "umap", "pyarrow", "pydantic", "typer"):
            return self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path if hasattr(finder, "find_spec")]
import gc
import transformers.models.llama.modeling_llama
from kvlens.lab.gpu import __main__
sys.path.append("tests")
from interpreted import quick_interpreter
quick_interpreter()
from kvlens import methods
from kvlens.lab.gpu import tier
every = tier.ways
tier.ways = lambda steps: list({{methods.get(way.name).family: way for way in every(steps)}}.values())
gc.freeze()  # garbage is collected after every part: the imported libraries are none
sys.argv = ["gpu", "--dry-run", "--out", {str(folder)!r}, "--parts", {",".join(WHOLE)!r}, "--contexts", "256"]
sys.argv += ["--batches", "1"]
sys.exit(__main__.main())"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "gpu-dry-run.json"


@pytest.mark.slow
def test_a_dry_run_goes_through_every_part(whole: Path) -> None:
    result = read(whole)
    assert result.dry_run
    assert not result.missing
    statuses = {entry.part: entry.status for entry in result.entries.values()}
    assert set(statuses.values()) == {"done"}
    early, alone, late = (
        [row for row in result.entries[f"decode 256 x 1{part}"].rows if isinstance(row, StepRow)]
        for part in ("", ", transformers alone", ", alike")
    )
    assert {row.method for row in late} == followers()
    assert [row.method for row in early] == [name for name in settings() if name not in followers()]
    assert [row.method for row in alone] == list(BASELINES)
    assert {row.way for row in early} == {"fused"}
    steps = early + alone + late
    assert all(row.reason is None and row.median is not None and row.floor is not None for row in steps)
    assert all((row.stall is None) == (not settings()[row.method].rates) for row in steps if row.method in settings())
    assert not [row for entry in result.entries.values() for row in entry.rows if not getattr(row, "passed", True)]


def test_what_is_done_is_not_measured_again(whole: Path) -> None:
    before, said = whole.read_text(), []
    measure(dry(whole.parent, WHOLE), said.append)
    after = json.loads(whole.read_text())
    assert [line for line in said if line.endswith("...")] == ["headlines ..."]
    assert {n: e for n, e in after["entries"].items() if n != "headlines"} == {
        n: e for n, e in json.loads(before)["entries"].items() if n != "headlines"
    }


def test_changed_sources_and_other_versions_are_measured_again(tmp_path: Path) -> None:
    path = measure(dry(tmp_path), lambda line: None)
    held = json.loads(path.read_text())
    held["entries"]["ledger"]["sources"] = "older"
    path.write_text(json.dumps(held))
    said: list[str] = []
    measure(dry(tmp_path), said.append)
    assert [line for line in said if line.endswith("...")] == ["ledger ...", "headlines ..."]
    held["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(held))
    said.clear()
    measure(dry(tmp_path), said.append)
    assert [line for line in said if line.endswith("...")] == ["ceilings ...", "ledger ...", "headlines ..."]


def test_one_parts_failure_is_a_sentence_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(bench: Bench) -> list[Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")

    monkeypatch.setattr(ceilings, "PART", replace(ceilings.PART, run=fails))
    said: list[str] = []
    path = measure(dry(tmp_path), said.append)
    entry = read(path).entries["ceilings"]
    assert entry.status == "failed"
    assert entry.reason == "The device ran out of memory: CUDA out of memory. Tried to allocate 1 GiB."
    assert entry.suggestion == ceilings.PART.smaller
    assert read(path).entries["ledger"].status == "done"
    monkeypatch.undo()
    said.clear()
    measure(dry(tmp_path), said.append)
    assert said[0] == "ceilings ..."
    assert read(path).entries["ceilings"].status == "done"


def test_a_broken_device_ends_the_sitting_and_what_broke_it_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(bench: Bench) -> list[Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ceilings, "PART", replace(ceilings.PART, run=breaks))
    monkeypatch.setattr(DryDevice, "alive", lambda self: False)
    said: list[str] = []
    path = measure(dry(tmp_path), said.append)
    assert said[-1].startswith("The device is in an error state")
    assert read(path).missing == ["ledger", "headlines"]
    said.clear()
    measure(dry(tmp_path), said.append)
    assert [line for line in said if line.endswith("...")] == ["ledger ...", "ceilings ..."]


def test_parts_are_measured_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    """A part's whole name may have a comma in it, and may begin another's."""
    text = "row gathers; decode 256 x 2; ceilings"
    parts, whole = run.part_names(text)
    assert (parts, whole) == (("row gathers", "decode 256 x 2", "ceilings"), True)
    assert run.part_names("ceilings, decode") == (("ceilings", "decode"), False)
    request = Request(tmp_path, parts=parts, dry_run=True, whole_names=whole)
    names = [part.name for part in run.all_parts((256,), (1, 2))]
    taken = [name for name in names if request.place_of(name) is not None]
    assert sorted(taken) == sorted(parts)
    assert "decode 256 x 2, replayed" in names
    said: list[str] = []
    measure(dry(tmp_path, ("row gathers", "ceilings"), whole_names=True), said.append)
    assert [line for line in said if line.endswith("...")] == ["row gathers ...", "ceilings ..."]


def test_the_time_limit_stops_between_parts(tmp_path: Path) -> None:
    said: list[str] = []
    measure(Request(tmp_path, 1e-9, QUICK, True, (256,), (1,)), said.append)
    assert said[0] == "1e-09 minutes are over; run again for: ceilings, ledger."
    assert [line for line in said if line.endswith("...")] == ["headlines ..."], "arithmetic takes no time"


@pytest.mark.parametrize("wrong", [{"parts": ("x",)}, {"minutes": 0}, {"contexts": (1000,)}, {"batches": (0,)}])
def test_bad_requests_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\.$"):
        Request(tmp_path, **wrong)


def test_lists_of_numbers() -> None:
    assert run.numbers("8192, 32768,") == (8192, 32768)
    with pytest.raises(ValueError, match="'8K' is not a list of whole numbers"):
        run.numbers("8K")


def test_a_file_of_something_else_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "gpu-dry-run.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"is not a result of this benchmark"):
        measure(dry(tmp_path), lambda line: None)
    with pytest.raises(ValueError, match=r"measure it again"):
        read(tmp_path / "gpu-dry-run.json")


def test_without_cuda_it_is_one_sentence_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for program, command in ((kvlens_main, ["kvlens", "bench", "gpu"]), (bare_main, ["gpu"])):
        monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            sys.exit(program())
        assert ended.value.code == 1
        assert " ".join(capsys.readouterr().err.split()).endswith("--dry-run tries the same code on the CPU.")
        assert not list(tmp_path.iterdir())


def test_it_loads_no_store_and_no_pages() -> None:
    code = """
import sys, kvlens.lab.gpu.run
heavy = ("duckdb", "streamlit", "plotly", "umap", "pydantic", "transformers")
print([name for name in heavy if name in sys.modules])"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


# the page of the docs


def test_the_docs_are_what_the_results_say() -> None:
    results = [read(path) for path in list_files(ROOT / "kvlens/lab/results")]
    text = (ROOT / "docs" / "evidence" / "performance.md").read_text(encoding="utf-8")
    assert with_tables(text, page(results, read_rates())) == text, (
        "run python -m kvlens.lab.gpu.report --write docs/evidence/performance.md"
    )
    assert text.count(MARKS[0]) == 1


def test_dry_runs_never_reach_the_docs(whole: Path) -> None:
    result = read(whole)
    assert "Nothing has been measured on a GPU yet" in page([result], read_rates())
    shown = page([replace(result, dry_run=False)], read_rates())
    assert "Nothing has been measured" not in shown
    for word in ("achieved / floor", "share of it", "passed", "headline", "equal", "added"):
        assert word in shown


def test_parts_are_named_after_what_can_be_asked_for() -> None:
    parts = run.all_parts(run.CONTEXTS, run.BATCHES)
    assert all(isinstance(part, Part) and part.name.startswith(run.NAMES) for part in parts)
    assert len({part.name for part in parts}) == len(parts)
    assert ledger.PART in parts


def test_two_sittings_come_past_what_proves_the_most() -> None:
    names = [part.name for part in run.all_parts(run.CONTEXTS, run.BATCHES)]
    assert names[:6] == ["ceilings", "checks", "step checks", "engine", "ledger", "offload"]
    whole = [name for name in names if name.startswith("decode") and " x " in name and "," not in name]
    assert whole[:4] == [f"decode {context} x {batch}" for context in (32768, 131072) for batch in (1, 8)]
