"""docs/api.md and the docstrings of the API say what is: their code runs, their tables are those of the code."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import kvlens
import kvlens.api
from kvlens.api import errors
from kvlens.api.columns import TABLES, documentation
from kvlens.api.verdict import OUTCOMES, Verdict

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    """Code of the page's blocks of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.M | re.S)


def test_the_examples_of_the_page_run(runs: Path) -> None:
    code = blocks("python")
    assert len(code) >= 7
    names = {"kvlens": kvlens}
    for number, block in enumerate(code):
        exec(compile(block, f"docs/api.md, block {number}", "exec"), names)


@pytest.mark.parametrize("table", list(TABLES))
def test_the_page_has_every_column(table: str) -> None:
    assert f"<!-- columns: {table} -->\n\n{documentation(table)}\n" in PAGE


def test_the_page_has_every_error_code_and_field() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "kvlens" / "api").glob("*.py"))
    codes = set(re.findall(r'(?:Error\(\s*|unknown_name\(\s*|Error, )"(\w+)"', source))
    assert {"budget_twice", "unsupported_model", "unknown_parameter", "nothing_named"} <= codes
    assert {code for code in codes if f"`{code}`" not in PAGE} == set()
    assert {name for name in Verdict.__dataclass_fields__ if f"`{name}`" not in PAGE} == set()
    assert {name for name in OUTCOMES if f"`{name}`" not in PAGE} == set()
    for kind in errors.KvlensError.__subclasses__():
        assert f"`{kind.__name__}`" in PAGE


MODULES = [f"kvlens.api.{module.name}" for module in pkgutil.iter_modules(kvlens.api.__path__)]


def test_the_examples_in_docstrings_run(runs: Path) -> None:
    ran = 0
    for name in MODULES:
        module = importlib.import_module(name)
        finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
        for example in finder.find(module, name, extraglobs={"kvlens": kvlens}):
            runner.run(example)
        assert runner.failures == 0, name
        ran += runner.tries
    assert ran >= 6


def test_every_public_name_is_documented() -> None:
    for name in kvlens.api.__all__:
        assert getattr(kvlens.api, name).__doc__
        assert name in dir(kvlens)
        assert re.search(rf"`(kvlens\.)?{name}\b", PAGE) or f"kvlens.{name}(" in PAGE, name
