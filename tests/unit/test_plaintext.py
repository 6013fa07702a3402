"""Text from elsewhere in every output: no escape sequence, no reversed direction, no formula, no icon."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from kvlens.app.report import report_bytes
from kvlens.app.ui.common.download import statistics_file
from kvlens.app.ui.common.pagereader import PageReader
from kvlens.app.ui.common.widgets import plain
from kvlens.cli.main import app
from kvlens.store.export import csv_bytes, csv_cells
from kvlens.store.reader import TraceReader
from kvlens.text.plaintext import json_text, terminal, visible
from tests.synthetic import write_synthetic

UNSEEN = ["\x1b[31m", "\x1b]0;t\x07", "\x9b31m", "\r", "\x00", "\x08", "\u202e", "\u2066", "\u2028", "\x85"]
UNSEEN += ["\ud800"]
HOSTILE = "good\u202eexe.txt\x1b[2J\x9b31m\rpass"
FORMULAS = ["=1+1", "+1", "-1", "@a", "\t=1", "\r=1", "\n=1", " =1", "＝1+1", "＋1", "－1", "＠a", "\u3000=1"]
FORMULAS += ["a\n=1", "a\r\n=1"]
NO_WIDTH = "\ufeff\u200b\u200c\u200d\u200e\u200f\u2060\u00ad"
FORMULAS += [f"{hidden}{sign}1" for hidden in NO_WIDTH for sign in "=+-@"]
FORMULAS += ["\ufeff\u200b =1", "\u2003=1", "a\n\u200b=1"]


@pytest.mark.parametrize("sign", UNSEEN)
def test_what_is_not_seen_is_named(sign: str) -> None:
    for made in (visible(f"a{sign}b"), terminal(f"a{sign}b"), plain(f"a{sign}b")):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", made)
        made.encode()
    assert json.loads(json_text({"a": f"x{sign}"})) == {"a": f"x{sign}"}


def test_what_is_seen_stays() -> None:
    text = "naïve\tline\nسلام 日本 👩‍👩‍👧"
    assert visible(text) == text
    assert visible("a\r\nb") == "a\nb"


def test_later_lines_cannot_pass_for_lines_of_kvlens() -> None:
    assert terminal("x\nself-check      pass", 4) == "x\n    self-check      pass"


@pytest.mark.parametrize("text", [":material/home:", "a:smile:b", ":+1:", ":red_circle:", ":streamlit:"])
def test_no_name_of_an_icon_is_left(text: str) -> None:
    bare = plain(text).replace("\\", "")
    assert not re.search(r":[\w+/-]+:", bare)
    assert bare.replace("\u2060", "") == text


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_or_line_of_one_begins_like_a_formula(text: str) -> None:
    cell = next(csv.reader(io.StringIO(csv_bytes(pd.DataFrame({"t": [text]})).decode().split("\n", 1)[1])))[0]
    for line in re.split(r"[\n\r]", cell):
        assert not re.match(rf"[\s{NO_WIDTH}]*[=+\-@＝＋－＠]", line)
    assert cell.replace("'", "") == text
    again = csv_cells(pa.table({"t": pa.array([text], pa.large_string())}))
    assert again.column(0)[0].as_py() == cell


def test_numbers_and_plain_text_are_as_they_were() -> None:
    assert (
        csv_bytes(pd.DataFrame({"t": ["a-b", "x=1", "1"], "n": [-1, 2, 3]})) == b'"t","n"\n"a-b",-1\n"x=1",2\n"1",3\n'
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that says everything wrong that a run can say of itself."""
    folder = tmp_path_factory.mktemp("hostile")
    uid = write_synthetic(folder, 1, 2, 1, 4, 8, model=f"=model{HOSTILE}", method="=full", answer=HOSTILE, task=HOSTILE)
    trace = folder / uid / "trace.duckdb"
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        con.execute("UPDATE token SET text = ? WHERE step IS NOT NULL", [HOSTILE])
        con.execute("UPDATE self_check SET detail = ?", [f"{HOSTILE}\nself-check      pass  forged"])
    info = json.loads((folder / uid / "run.json").read_text())
    (folder / uid / "run.json").write_text(json.dumps(info | {"output_text": HOSTILE, "model": HOSTILE}))
    return folder, uid


@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["show"], ["show", "--json"]])
def test_the_command_line_prints_no_escape(hostile: tuple[Path, str], command: list[str]) -> None:
    folder, uid = hostile
    arguments = ["runs", command[0], *([uid] if command[0] == "show" else []), "--runs", str(folder), *command[1:]]
    said = CliRunner().invoke(app, arguments).stdout
    assert "exe.txt" in said
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", said)
    assert not re.search(r"(?m)^self-check +pass  forged", said)


def test_partial_statistics_and_reports_are_neutral(hostile: tuple[Path, str]) -> None:
    folder, uid = hostile
    with TraceReader.open(folder, uid) as reader:
        rows = list(csv.reader(io.StringIO(statistics_file(reader, 1, 3, False, "csv").decode())))
        assert all(not cell.startswith(("=", "+", "@")) for row in rows for cell in row)
        assert "'=full" in rows[1]
        text = report_bytes(reader).split(b"<script")[0].decode()
    assert "exe.txt" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_pages_read_tables_with_unseen_characters_named(hostile: tuple[Path, str]) -> None:
    with PageReader.open(*hostile) as reader:
        text = reader.tokens().query("step == 1")["text"].iloc[0]
    assert text == visible(HOSTILE)
