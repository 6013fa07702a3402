"""Small benchmark files made in the tests, and prompts of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvlens import tasks


def by_word(text: str) -> list[int]:
    return list(range(len(text.split())))


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def ask(spec: str, index: int = 0, length: int | None = None) -> tasks.TaskPrompt:
    return tasks.get(spec).make(length, None, 0, by_word, 1, index)


def grade(spec: str, output: str, index: int = 0) -> float:
    return tasks.get(spec).grade(ask(spec, index), output)
