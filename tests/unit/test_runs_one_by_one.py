"""Maps over many runs hold one run open at a time."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

import kvlens
from kvlens.app.ui.heads import retrieval
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic


class Counted:
    """A reader that counts those that are open; the run 'bad' cannot be read."""

    now = most = 0

    def __init__(self, uid: str) -> None:
        self.uid = uid

    @classmethod
    def open(cls, folder: Path, uid: str) -> Self:
        if uid == "bad":
            raise TraceError("bad")
        return cls(uid)

    def __enter__(self) -> Self:
        Counted.now += 1
        Counted.most = max(Counted.most, Counted.now)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        Counted.now -= 1


def test_the_heads_page_holds_one_reader_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "TraceReader", Counted)
    Counted.now = Counted.most = 0
    assert [reader.uid for reader in retrieval.one_by_one(tmp_path, ("a", "bad", "b", "c"))] == ["a", "b", "c"]
    assert (Counted.most, Counted.now) == (1, 0)


def test_the_api_holds_one_reader_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (1, 2, 3):
        write_synthetic(tmp_path, 2, 4, 2, 6, 6, seed=seed, needle=[[30, 60]], prompt_sha256=f"{seed}")
    opened, closed, most = TraceReader.open.__func__, TraceReader.close, 0  # type: ignore[attr-defined]
    now: set[int] = set()

    def counting_open(cls: type[TraceReader], folder: Path, uid: str) -> TraceReader:
        nonlocal most
        reader: TraceReader = opened(cls, folder, uid)
        now.add(id(reader))
        most = max(most, len(now))
        return reader

    def counting_close(self: TraceReader) -> None:
        now.discard(id(self))
        closed(self)

    monkeypatch.setattr(TraceReader, "open", classmethod(counting_open))
    monkeypatch.setattr(TraceReader, "close", counting_close)
    assert len(kvlens.retrieval_heads(runs=tmp_path).attrs["runs"]) == 3
    assert (most, len(now)) == (1, 0)
