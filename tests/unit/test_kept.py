"""The file of finished trials of measurements that are no studies: claims, free text, the lens, the ledger study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlens.lab.bench import kept

NEEDED = ("key", "method")
ROWS = [{"key": "a", "method": "full"}, {"key": "b", "method": "full"}]


def read(path: Path) -> list[str]:
    return [row["key"] for row in kept.read(path, NEEDED, lambda row: row["key"] != "old")]


def test_a_cut_line_is_taken_off_and_other_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "k.jsonl"
    for row in [*ROWS, {"key": "old", "method": "full"}]:
        kept.append(path, row)
    whole, place = path.read_bytes(), path.stat().st_ino
    path.write_bytes(whole + b'{"key": "half')
    assert read(path) == ["a", "b"]
    assert (path.read_bytes(), path.stat().st_ino) == (whole, place), "it is not written anew"


@pytest.mark.parametrize("text", ['{"a": 1}\n', "[1]\n{", "a letter", "not a trial\n"])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "k.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"k\.jsonl"):
        read(path)
    assert path.read_text() == text


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c"])
def test_a_line_separator_in_a_text_does_not_end_a_line(tmp_path: Path, sign: str) -> None:
    path = tmp_path / "k.jsonl"
    path.write_text(json.dumps(ROWS[0] | {"output": f"a{sign}b"}, ensure_ascii=False) + "\n")
    assert kept.read(path, NEEDED, lambda row: True)[0]["output"] == f"a{sign}b"


def test_two_measurements_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "k.jsonl"

    @kept.alone
    def measure(request: int, file: Path) -> int:
        if request:
            with pytest.raises(ValueError, match=r"k\.jsonl"):
                measure(request - 1, file)
        return request

    assert measure(1, path) == 1
    assert measure(0, path) == 0, "and the file is free again afterwards"
