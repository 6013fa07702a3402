"""The worked diffs of CONTRIBUTING.md apply to this tree, touch one file each, and do what they say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import copy

import pytest

from kvlens import methods
from kvlens.checking.methodfile import read_method
from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic

ROOT = Path(__file__).resolve().parents[2]
DIFFS = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S)
CAPTION, METRIC, METHOD = range(3)


def applied(diff: str, folder: Path) -> Path:
    """Apply a diff to copies of the files that it names; return the only one."""
    (name,) = set(re.findall(r"^\+\+\+ b/(.+)$", diff, flags=re.MULTILINE))
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if (ROOT / name).is_file():
        copy(ROOT / name, target)
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=folder, check=True)
    return target


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Methods that a test registers are gone after it."""
    before = dict(methods._registered)
    yield
    methods._registered.clear()
    methods._registered.update(before)
    methods.registry.cache_clear()


def test_there_are_three_diffs_and_each_touches_one_file(tmp_path: Path) -> None:
    assert len(DIFFS) == 3
    for number, diff in enumerate(DIFFS):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert applied(diff, folder).is_file()


def test_the_caption_is_the_pages(tmp_path: Path) -> None:
    target = applied(DIFFS[CAPTION], tmp_path)
    (added,) = re.findall(r"^\+ +(st\.caption\(.*\))$", DIFFS[CAPTION], flags=re.MULTILINE)
    assert target.read_text(encoding="utf-8").count(added) == 1
    assert compile(target.read_text(encoding="utf-8"), target.name, "exec")


def test_the_metric_is_measured_and_has_its_meaning(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("figures_of_the_diff", applied(DIFFS[METRIC], tmp_path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    uid = write_synthetic(tmp_path / "runs", 2, 4, 2, 6, 10, seed=1)
    with TraceReader.open(tmp_path / "runs", uid) as reader:
        figures = module.figures_of(reader)
    assert 0 <= figures["unread"] <= 1
    assert module.FIGURES["unread"][1] == "share"


def test_the_method_is_one(tmp_path: Path, forgotten: None) -> None:
    method = read_method(str(applied(DIFFS[METHOD], tmp_path)))
    assert (method.name, method.family) == ("short_keys", "prompt_eviction")
