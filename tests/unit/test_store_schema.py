"""The file format may not change under the same version."""

from __future__ import annotations

import hashlib

import duckdb

from kvlens.rows import SCHEMA_VERSION
from kvlens.store.schema import TABLES, statements

FINGERPRINTS = {
    1: "dd9c03ba8038796a",
    2: "4a9ce1e4e806e63b",
    3: "80682df7fc8cdc86",
    4: "1c01f3c3d0d0d05c",
    5: "3155e994debee567",
    6: "26fb0a0a79228751",
    7: "6ad7f8ff918eeaa4",
    8: "96ce360879bfab0b",
    9: "572c041f7a5cee3b",
    10: "a1be0a75c022d100",
    11: "5a766949d6b40189",
    12: "5c810834a91b98f1",
    13: "7568c410d20c7573",
}


def test_a_change_of_the_schema_needs_a_new_version() -> None:
    fingerprint = hashlib.sha256("\n".join(statements()).encode()).hexdigest()[:16]
    assert FINGERPRINTS.get(SCHEMA_VERSION) == fingerprint, (
        "raise SCHEMA_VERSION, or this fingerprint before the first release"
    )


def test_the_statements_make_the_tables_a_reader_expects() -> None:
    con = duckdb.connect()
    for statement in statements():
        con.execute(statement)
    assert {row[0] for row in con.execute("SELECT table_name FROM duckdb_tables()").fetchall()} == set(TABLES)
