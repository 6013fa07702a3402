"""The generated parts of docs/trace-format.md: the keys of trace.json, the tables, and the codes of faults.

Usage: python -m kvlens.trace.page docs/trace-format.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlens.trace.columns import Column
from kvlens.trace.faults import CODES
from kvlens.trace.head import Head
from kvlens.trace.tables import TABLES


def head_table() -> str:
    """Return the Markdown table of the keys of trace.json."""
    rows = [
        f"| `{name}` | {'yes' if field.is_required() else ''} | {field.description or 'kvlens-trace'} |"
        for name, field in Head.model_fields.items()
    ]
    return "\n".join(["| key | required | meaning |", "| --- | --- | --- |", *rows])


def overview() -> str:
    """Return the Markdown table of all tables."""
    rows = [
        f"| [`{name}`](#{name}) | {'yes' if table.required else ''} | {table.meaning} | {table.adds} |"
        for name, table in TABLES.items()
    ]
    return "\n".join(["| table | required | one row per | what it adds |", "| --- | --- | --- | --- |", *rows])


def column_tables() -> str:
    """Return a section with a Markdown table of columns for each table."""
    parts = []
    for name, table in TABLES.items():
        key = f" Key: {', '.join(table.key)}." if table.key else ""
        between = " Step -1 is the end of prefill." if table.between else ""
        rows = [_row(column, about) for column, about in table.columns.items()]
        heading = ["| column | type | required | unit | meaning |", "| --- | --- | --- | --- | --- |"]
        parts.append("\n".join([f"### {name}", "", f"One row per {table.meaning}.{key}{between}", "", *heading, *rows]))
    return "\n\n".join(parts)


def _row(name: str, column: Column) -> str:
    rule = f" ({column.rule})" if column.rule else ""
    required = "yes" if column.required else ""
    meaning = f"{column.meaning}{rule}".replace("||", "\\|\\|")
    return f"| `{name}` | {column.kind} | {required} | {column.unit or '-'} | {meaning} |"


def code_table() -> str:
    """Return the Markdown table of the codes of faults."""
    rows = [f"| `{code}` | {text.split('; ', 1)[0]} | {text.split('; ', 1)[1]} |" for code, text in CODES.items()]
    return "\n".join(["| code | what is wrong | what to do |", "| --- | --- | --- |", *rows])


PARTS = {"head": head_table, "overview": overview, "columns": column_tables, "codes": code_table}


def renewed(text: str) -> str:
    """Return the page with its generated parts made anew."""
    for name, make in PARTS.items():
        part = f"<!-- {name}: begin -->\n{make()}\n<!-- {name}: end -->"
        ending = f"<!-- {name}: end -->"
        start, end = text.find(f"<!-- {name}: begin -->"), text.find(ending)
        if not 0 <= start < end:
            raise ValueError(f"the page has no part {name}")
        text = text[:start] + part + text[end + len(ending) :]
    return text


def main() -> None:
    """Renew a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
