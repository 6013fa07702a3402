"""What a page asked a run for once is kept, within bounds, and nobody's copy is another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvlens.app.data import keeping
from kvlens.app.data.keeping import KeepingSession
from kvlens.app.ui.common.pagereader import PageReader
from kvlens.store import queries
from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("pagereader")
    return folder, write_synthetic(folder, 2, 4, 2, 6, 8, prompt_tokens=120)


@pytest.fixture
def reader(written: tuple[Path, str]) -> Iterator[PageReader]:
    with PageReader.open(*written) as opened:
        yield opened


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that reach the file."""
    found: list[str] = []
    plain = KeepingSession._execute

    def execute(session: KeepingSession, sql: str, values: dict[str, Any]) -> Any:
        found.append(sql)
        return plain(session, sql, values)

    monkeypatch.setattr(KeepingSession, "_execute", execute)
    return found


def test_a_table_is_asked_for_once(reader: PageReader, written: tuple[Path, str], asked: list[str]) -> None:
    first, second = reader.tokens(), reader.tokens()
    assert asked == [queries.TOKENS]
    with TraceReader.open(*written) as plain:
        for frame in (first, second):
            pd.testing.assert_frame_equal(frame, plain.tokens())


def test_other_values_are_another_question(reader: PageReader, asked: list[str]) -> None:
    both = [reader.transfers(layer=layer) for layer in (0, 1, 0)]
    assert len(asked) == 2
    pd.testing.assert_frame_equal(both[0], both[2])
    assert set(both[0]["layer"].dropna()) != set(both[1]["layer"].dropna())


def test_what_one_writes_the_other_does_not_read(reader: PageReader) -> None:
    first = reader.spans()
    before = first.copy(deep=True)
    first["more"] = 1
    first.loc[0, "tok_start"] = -5
    first.drop(first.index[1:], inplace=True)
    pd.testing.assert_frame_equal(reader.spans(), before)
    rows = reader._db.rows(queries.JOURNAL_NAMES)
    rows.append(("x",))
    assert reader._db.rows(queries.JOURNAL_NAMES) == rows[:-1]


def test_what_was_used_longest_ago_goes_first(
    reader: PageReader, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(number: int, sql: str = "SELECT $number::INTEGER AS number") -> pd.DataFrame:
        return reader._db.frame(sql, number=number)

    monkeypatch.setattr(keeping, "KEPT_BYTES", 4 * keeping._frame_bytes(ask(-1)))
    for number in (0, 1, 2, 3, 0, 4):
        ask(number)
    asked.clear()
    for number in (0, 2, 3, 4):
        assert list(ask(number)["number"]) == [number]
    assert not asked, "the four that were used last are kept"
    ask(1)
    assert len(asked) == 1
    for _ in range(2):
        ask(2, "SELECT unnest([$number, $number, $number]) AS number")
    assert len(asked) == 3, "what is larger than a quarter is asked for each time"
