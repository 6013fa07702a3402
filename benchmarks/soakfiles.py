"""What the soak feeds to readers: damaged files, traces of another's making, prompts that are none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb

from kvlens.store.schema import SCHEMA_VERSION, statements

PAGE = 4096


def _flip(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _zero_page(data: bytearray, draw: random.Random) -> None:
    index = draw.randrange(max(1, len(data) // PAGE)) * PAGE
    data[index : index + PAGE] = bytes(len(data[index : index + PAGE]))


def _zero_tail(data: bytearray, draw: random.Random) -> None:
    index = draw.randrange(len(data))
    data[index:] = bytes(len(data) - index)


def _truncate(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


_HOW: dict[str, Callable[[bytearray, random.Random], None]] = {
    "flip": _flip,
    "zeroed page": _zero_page,
    "zeroed tail": _zero_tail,
    "truncation": _truncate,
}
#: kind -> (file, how): of a finished run its trace, of an interrupted one ('log') its write-ahead log.
DAMAGES = {f"trace {name}": ("trace.duckdb", how) for name, how in _HOW.items() if name != "zeroed tail"}
DAMAGES |= {f"log {name}": ("trace.duckdb.wal", how) for name, how in _HOW.items() if name != "zeroed page"}


def damage(folder: Path, kind: str, draw: random.Random) -> None:
    """Damages one file of a run in place."""
    name, how = DAMAGES[kind]
    path = folder / name
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    how(data, draw)
    path.write_bytes(data)


_LEAK = "SELECT content AS text, content AS status, 0 AS last_step, content AS error FROM read_text('/etc/hostname')"
#: Changes to an empty trace of a run of one head, or what lies in its place, each of which kvlens must refuse.
TRACES: list[Sequence[str] | bytes] = [
    *[(f"DROP TABLE {name}", f"CREATE VIEW {name} AS {_LEAK}") for name in ("step", "token", "meta", "run_state")],
    *[(f"DROP TABLE {name}",) for name in ("transfer", "head_step", "meta", "run_state", "self_check")],
    ("UPDATE meta SET value = '99' WHERE key = 'schema_version'",),
    ("UPDATE meta SET value = '{' WHERE key = 'layers'",),
    ("UPDATE meta SET value = '1e999' WHERE key = 'layers'",),
    ("UPDATE meta SET value = '-1' WHERE key = 'kv_heads'",),
    ("UPDATE meta SET value = repeat('[', 100000) WHERE key = 'q_heads'",),
    ("DELETE FROM meta",),
    ("DELETE FROM run_state",),
    ("INSERT INTO run_state VALUES ('running', 3, NULL)",),
    ("UPDATE run_state SET last_step = 1999999999",),
    ("UPDATE run_state SET last_step = 5",),
    ("UPDATE run_state SET last_step = -2147483648",),
    ("DROP TABLE span", "CREATE VIEW span AS SELECT * FROM run_state"),
    ("ALTER TABLE token RENAME TO tokens",),
    b"SQLite format 3\0" + bytes(4080),
    b"PAR1" + bytes(4000) + b"PAR1",
    bytes(3 * PAGE),
    b"not a database" * 1000,
]
PROMPTS = [
    b"",
    b"{",
    b"[]",
    b"3",
    b"null",
    b"\xff\xfe",
    b"[" * 300_000,
    b'{"a":' * 100_000,
    b'{"text": 3}',
    b'{"text": ""}',
    b'{"text": "a\\u0000b"}',
    b'{"text": "\\ud800"}',
    b'{"text": "abc", "answer": "\\udfff"}',
    b'{"text": "abc", "needle": [[0, Infinity]]}',
    b'{"text": "abc", "needle": [[NaN, 1]]}',
    b'{"text": "abc", "needle": [[0, 1e999]]}',
    b'{"text": "abc", "needle": [[0, ' + b"9" * 9000 + b"]]}",
    b'{"text": "abc", "needle": [[2, 1]]}',
    b'{"text": "abc", "needle": [[0, 9]]}',
    b'{"text": "abc", "needle": [[-1, 2]]}',
    b'{"text": "abc", "needle": [1]}',
    b'{"text": "abc", "needle": "ab"}',
    b'{"text": "abc", "needle": ' + b"[" * 300_000 + b"]" * 300_000 + b"}",
    b'{"text": "' + b"a" * (6 << 20) + b'"}',
    b"\x00",
    b'"abc"',
    b'{"text": "abc"',
    b'{"text": "abc"} {}',
    b'{"text": null}',
    b'{"text": ["abc"]}',
    b'{"text": " \\n\\t "}',
    b'{"txt": "abc"}',
    '{"text": "abc"}'.encode("utf-16"),
    b'{"text": "abc", "question": 0}',
    b'{"text": "abc", "question": 3}',
    b'{"text": "abc", "question": -' + b"9" * 400 + b"}",
    b'{"text": "abc", "task": "\\ud83d"}',
    b'{"text": "abc", "answer_prefix": "\\udc00"}',
    b'{"text": "abc", "needle": [[0, 1], [1]]}',
    b'{"text": "abc", "needle": {"start": 0, "end": 1}}',
]


def foreign(folder: Path, changes: Sequence[str] | bytes) -> None:
    """An interrupted run of one head with no step, its trace changed, or other bytes in its place."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": "running", "uid": folder.name}))
    if isinstance(changes, bytes):
        (folder / "trace.duckdb").write_bytes(changes)
        return
    with duckdb.connect(str(folder / "trace.duckdb")) as con:
        for statement in statements():
            con.execute(statement)
        con.execute("INSERT INTO run_state VALUES ('running', -1, NULL)")
        con.execute("INSERT INTO meta SELECT unnest(['layers', 'q_heads', 'kv_heads']), '1'")
        con.execute(f"INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}')")
        for change in changes:
            con.execute(change)
