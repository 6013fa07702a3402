"""The parity table says what was measured, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import kvlens
from kvlens.lab.studies.parity import RESULTS, expression, own_methods, page

PAGE = kvlens.PACKAGE.parent / "docs" / "parity.md"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name in ("observed.json", "observed-main.json", "oracle.json"):
        shutil.copy(RESULTS / name, tmp_path / name)
    return tmp_path


def changed(results: Path, press: str, **keys: Any) -> list[str]:
    """Return the page's lines when a press's row has other keys."""
    result = json.loads((results / "observed.json").read_text())
    row = next(row for row in result["rows"] if row["press"] == press)
    if "failed" in keys:
        row.clear()
    row |= {"press": press, "by_score": False, **keys}
    (results / "observed.json").write_text(json.dumps(result))
    return page(results).splitlines()


def test_the_page_is_made_from_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m kvlens.lab.studies.parity --write docs/parity.md"


def test_only_comparable_sets_are_called_equal(results: Path) -> None:
    rows = json.loads((results / "observed.json").read_text())["rows"]
    comparable = sum(row["rule"] == "every key" for row in rows)
    assert comparable < len(rows)
    assert f"{comparable} of {comparable} comparable kept sets" in page(results)
    assert f"{comparable - 1} of {comparable} comparable kept sets" in "\n".join(
        changed(results, "KnormPress", kept_equal=False)
    )


def test_a_press_that_failed_and_one_that_is_in_no_table_are_named(results: Path) -> None:
    result = json.loads((results / "observed.json").read_text())
    (results / "observed.json").write_text(json.dumps(result | {"not_listed": ["NewPress"]}))
    lines = changed(results, "CURPress", failed="ValueError: x")
    row = next(line for line in lines if line.startswith("| `CURPress`"))
    assert "failed: ValueError: x" in row
    assert row.count("|") == 13
    summary = next(line for line in lines if line.startswith("Failed: "))
    assert "CURPress" in summary
    assert "NewPress" in summary


def test_nested_presses_are_named_whole() -> None:
    own = own_methods()
    assert own["BlockPress"] == ("keydiff", "BlockPress(KeyDiffPress, block_size=16)")
    assert own["KeyRerotationPress"][1].startswith("KeyRerotationPress(StreamingLLMPress(")
    assert expression([["KnormPress", {"compression_ratio": 0.5}]]) == "KnormPress"


def test_the_presses_of_kvlenss_methods_keep_its_own_sets() -> None:
    """Measured on SmolLM2 too: every set, and every token but where the press attends another step 0."""
    own = json.loads((RESULTS / "observed.json").read_text())["own"]
    methods = {"snapkv", "keydiff", "tova", "streaming_llm"}
    assert {(row["model"], row["method"]) for row in own} == {
        (m, name) for m in ("random", "smollm2") for name in methods
    }
    assert all(row["sets_equal"] == row["sets"] > 0 for row in own)
    assert all(row["tokens_equal"] for row in own if not row["counts_whole_prompt"])


def test_a_cache_that_transformers_refuses_is_no_measurement(results: Path) -> None:
    lines = [line for line in page(results).splitlines() if line.startswith("| offloaded |")]
    assert lines
    assert all(line.split("|")[4].strip() == "-" for line in lines)


def test_a_cache_that_a_gpu_measured_has_no_row_of_a_machine_without_one(results: Path) -> None:
    refused = {"cache": "offloaded", "transformers": "5.23.0", "device": "cpu"}
    refused |= {"refused": "AssertionError: Torch not compiled with CUDA enabled"}
    counts = {"exact": 5850, "rewritten": 0, "nothing": 0, "largest_error": 0.0, "tokens_equal": True}
    measured = {"cache": "offloaded", "transformers": "5.17.0", "device": "cuda"} | counts
    (results / "caches-5.23.0.json").write_text(json.dumps([refused, refused | {"cache": "offloaded_static"}]))
    (results / "caches-cuda.json").write_text(json.dumps([measured]))
    rows = [line for line in page(results).splitlines() if line.startswith("| offloaded")]
    assert len([row for row in rows if row.startswith("| offloaded_static ")]) >= 1
    offloaded = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows if row.startswith("| offloaded |")]
    assert [cells[:6] for cells in offloaded] == [["offloaded", "5.17.0", "cuda", "-", "equal", "5,850"]]
