"""All generated parts of docs/: glossary, heads of method pages, commands, columns of the API's tables.

Usage: python -m kvlens.lab.studies.generated_pages [DOCS]. Written text stays. `make docs` runs it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvlens.api.columns import TABLES, documentation
from kvlens.lab.studies import command_page, method_pages
from kvlens.text import glossary

DOCS = Path(__file__).resolve().parents[3] / "docs"


def api_page(text: str) -> str:
    """Return docs/api.md with the columns of every table as the code has them."""
    for table in TABLES:
        mark = f"<!-- columns: {table} -->\n\n"
        old = re.compile(re.escape(mark) + r"(?:\|.*\n)+")
        text = old.sub(lambda _, mark=mark, table=table: f"{mark}{documentation(table)}\n", text)
    return text


def pages(docs: Path = DOCS) -> dict[Path, str]:
    """Return the text of every page that is generated, whole or in part."""
    command_line, api = docs / "command-line.md", docs / "api.md"
    return {
        docs / "glossary.md": glossary.page(),
        command_line: command_page.page(command_line.read_text(encoding="utf-8")),
        api: api_page(api.read_text(encoding="utf-8")),
    } | method_pages.pages(docs / "methods")


def main() -> None:
    """Write the pages that changed, and print their names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("docs", nargs="?", type=Path, default=DOCS, help="the folder docs/")
    for path, text in pages(parser.parse_args().docs).items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
