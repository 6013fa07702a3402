"""The open trace format: its page, its JSON schema and its writer are what the declaration says."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest
from traces import write_full, write_minimal

from kvlens.trace.check import check
from kvlens.trace.columns import FORMAT, VERSION
from kvlens.trace.head import Head, schema_text
from kvlens.trace.page import renewed
from kvlens.trace.tables import TABLES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "trace-format.md"
WRITER = ROOT / "kvlens" / "trace" / "writer.py"


def test_the_page_is_made_from_the_declaration() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == renewed(text), "run python -m kvlens.trace.page docs/trace-format.md"


def test_the_schema_is_made_from_the_declaration() -> None:
    stored = (ROOT / "kvlens" / "trace" / "trace.schema.json").read_text(encoding="utf-8")
    assert stored == schema_text(), "run python -m kvlens.trace.head --write kvlens/trace/trace.schema.json"


@pytest.mark.parametrize("write", [write_minimal, write_full])
def test_what_the_writer_writes_is_valid(tmp_path: Path, write: object) -> None:
    assert callable(write)
    head = json.loads((write(tmp_path / "t") / "trace.json").read_text())
    jsonschema.validate(head, json.loads(schema_text()))
    for wrong in ({"layers": 0}, {"steps": -1}, {"complete": "yes"}, {"format": "other"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(head | wrong, json.loads(schema_text()))


def test_the_writer_is_one_short_file_that_needs_numpy_and_pyarrow() -> None:
    text = WRITER.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(str(node.module).partition(".")[0])
    assert names - set(sys.stdlib_module_names) == {"numpy", "pyarrow"}
    assert f'FORMAT, VERSION = "{FORMAT}", {VERSION}' in text


def test_the_example_of_the_page_writes_a_sound_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(PAGE), "exec"), {})
    checked = check(tmp_path / "trace")
    assert checked.tables["head_step"].to_pydict()["unread"] == [0.5, 0.5]
    assert checked.head.output_text == "8"


def test_every_column_has_a_meaning() -> None:
    for table in TABLES.values():
        assert set(table.key) <= set(table.columns)
        for group in table.equal_lists:
            assert set(group) <= set(table.columns)
        assert all(column.meaning for column in table.columns.values())
    assert all(field.description or name == "format" for name, field in Head.model_fields.items())
