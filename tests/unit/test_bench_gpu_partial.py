"""What is left of parts that were not measured whole: rows before a failure, a process that ended in the midst, missing
figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlens.lab.gpu import ceilings, kernel_checks, offload
from kvlens.lab.gpu.device import DryDevice
from kvlens.lab.gpu.failures import Lacking
from kvlens.lab.gpu.part import Bench
from kvlens.lab.gpu.run import Request, measure
from kvlens.lab.gpu.schema import read
from kvlens.lab.gpu.tables import device
from kvlens.lab.results.gpu import CeilingRow, CheckRow, KernelRow, Row
from kvlens.lab.results.offloadrow import OffloadRow

pytestmark = pytest.mark.usefixtures("quick_gc")

COPY = CeilingRow("device copy", "1 MiB", 1.0, 2.0, "B/s", 2.0)


@pytest.fixture
def sitting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Bench], Any]], tuple[list[str], Any]]:
    """A dry run of one part that does what it is told: what was said, and the part's entry."""

    def run(work: Callable[[Bench], Any]) -> tuple[list[str], Any]:
        said: list[str] = []
        monkeypatch.setattr(ceilings, "PART", replace(ceilings.PART, run=work))
        path = measure(Request(tmp_path, 10, ("ceilings",), True, (256,), (1,)), said.append)
        return said, read(path).entries["ceilings"]

    return run


def test_rows_before_a_failure_are_kept(sitting: Any, tmp_path: Path) -> None:
    def fails(bench: Bench) -> Iterator[Row]:
        yield COPY
        raise torch.OutOfMemoryError("CUDA out of memory.")

    _, entry = sitting(fails)
    assert (entry.status, entry.rows) == ("failed", [COPY])
    result = read(tmp_path / "gpu-dry-run.json")
    bare = replace(result, entries={"ceilings": replace(entry, rows=[])})
    assert ["ceilings, in part:" in device(each) for each in (result, bare)] == [True, False]
    assert "ceilings, failed:" in device(bare)


def test_a_process_that_ends_in_the_midst_leaves_word_of_it(sitting: Any, tmp_path: Path) -> None:
    def killed(bench: Bench) -> Iterator[Row]:
        yield COPY
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sitting(killed)
    entry = read(tmp_path / "gpu-dry-run.json").entries["ceilings"]
    assert (entry.status, entry.reason) == ("failed", "it was begun and did not end")
    said, entry = sitting(lambda bench: [COPY])
    assert said[0] == "ceilings ..."
    assert entry.status == "done"


def test_rows_are_in_the_file_as_they_come(sitting: Any, tmp_path: Path) -> None:
    seen: list[int] = []

    def slow(bench: Bench) -> Iterator[Row]:
        yield COPY
        yield COPY
        seen.append(len(read(tmp_path / "gpu-dry-run.json").entries["ceilings"].rows))

    _, entry = sitting(slow)
    assert (seen, entry.status, entry.reason) == ([2], "done", None)


@pytest.mark.parametrize(
    ("problem", "order", "said"),
    [
        (Lacking("the model is not here", "bring it"), ["ceilings ...", "checks ..."], "The model is not here"),
        (RuntimeError("it broke"), ["checks ...", "ceilings ..."], "RuntimeError: it broke"),
    ],
)
def test_what_lacks_something_keeps_its_place_and_what_failed_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, order: list[str], said: str
) -> None:
    def fails(bench: Bench) -> Iterator[Row]:
        yield COPY
        raise problem

    monkeypatch.setattr(ceilings, "PART", replace(ceilings.PART, run=fails))
    monkeypatch.setattr(kernel_checks, "PART", replace(kernel_checks.PART, run=lambda bench: [COPY]))
    measure(Request(tmp_path, 10, ("ceilings",), True, (256,), (1,)), lambda line: None)
    told: list[str] = []
    path = measure(Request(tmp_path, 10, ("ceilings", "checks"), True, (256,), (1,)), told.append)
    assert [line for line in told if line.endswith("...")] == order
    entry = read(path).entries["ceilings"]
    assert (entry.status, entry.rows, entry.lacking) == ("failed", [COPY], isinstance(problem, Lacking))
    assert entry.reason is not None
    assert entry.reason.startswith(said)


def test_a_part_without_a_figure_is_not_done(sitting: Any) -> None:
    lacks = [KernelRow(name, "one", None, 1.0, None, "device copy", None, None, "no compiler") for name in ("k1", "k2")]
    said, entry = sitting(lambda bench: lacks)
    assert (entry.status, entry.reason, entry.rows) == ("failed", "no compiler", lacks)
    assert said[-1] == "  k1, one; k2, one: no compiler"
    said, entry = sitting(lambda bench: [*lacks, COPY, CheckRow("k4", 1.0, 0.0, False)])
    assert entry.status == "done"
    assert said[-2:] == ["  k1, one; k2, one: no compiler", "  k4: FAILED"]


def test_a_kernel_that_cannot_be_run_is_a_failed_check_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(kernel_checks.merge, "merge", broken)
    rows = list(kernel_checks.measure(Bench(DryDevice(), (256,), (1,), {"entries": {}})))
    failed = [row.name.partition(" (")[0] for row in rows if not row.passed]
    said = "RuntimeError: out of resource: shared memory"
    assert failed == [f"merge, {kind}: {said}" for kind in ("bf16", "fp16", "fp32")]
    assert len(rows) > 80


def test_one_tf32_product_is_a_failed_check_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operands have ten bits of mantissa: less than fp32 may lose, more than bf16 does."""
    exact = kernel_checks.page_scores.page_scores

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype != torch.float32 else (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    def tf32(q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, *more: Any) -> torch.Tensor:
        return exact(cut(q), cut(lo), cut(hi), *more)

    monkeypatch.setattr(kernel_checks.page_scores, "page_scores", tf32)
    rows = list(kernel_checks.measure(Bench(DryDevice(), (256,), (1,), {"entries": {}})))
    failed = {row.name for row in rows if not row.passed}
    assert failed == {f"k2 {pooling}, fp32" for pooling in kernel_checks.page_scores.POOLINGS}


def test_what_is_not_compared_is_neither_passed_nor_failed(sitting: Any, tmp_path: Path) -> None:
    said, _ = sitting(lambda bench: [CheckRow("bytes, behind a tie", 0.5, 0.0, None), CheckRow("k4", 1.0, 0.0, False)])
    assert [line for line in said if "FAILED" in line] == ["  k4: FAILED"]
    shown = device(read(tmp_path / "gpu-dry-run.json"))
    assert "behind a tie | 0.5 | 0 | not compared |" in shown
    assert "| k4 | 1 | 0 | **FAILED** |" in shown


def test_the_part_is_done_only_for_the_model_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a model that is not here costs nothing of what another came to."""

    def run(bench: Bench) -> Iterator[OffloadRow]:
        if bench.offloaded == "nowhere":
            raise Lacking("the model is not here", "bring it")
        yield OffloadRow("freekv", bench.offloaded, "float16", 100, "20%", 3, 1.0)

    def sitting(model: str) -> tuple[list[str], list[str]]:
        """What was measured, and whose rows the file then has."""
        said: list[str] = []
        path = measure(Request(tmp_path, 10, (offload.NAME,), True, (256,), (1,), model), said.append)
        rows = [row.model for row in read(path).entries[offload.NAME].rows if isinstance(row, OffloadRow)]
        return [line.partition(" in ")[0] for line in said], rows

    monkeypatch.setattr(offload, "_model", lambda bench: bench.offloaded)
    monkeypatch.setattr(offload, "PART", replace(offload.PART, run=run))
    done, failed = (["offload ...", f"offload: {status}"] for status in ("done", "failed"))
    assert sitting("one") == (done, ["one"])
    assert sitting("one") == ([], ["one"])
    assert sitting("nowhere") == (failed, ["one"])
    assert sitting("one") == ([], ["one"])
    assert sitting("other") == (done, ["other"])
    assert sitting("one") == (done, ["one"])
