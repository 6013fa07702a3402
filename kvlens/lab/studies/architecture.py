"""Draw the picture and the table of docs/architecture.md.

Usage: python -m kvlens.lab.studies.architecture [--write FILE.svg] [--page FILE.md]. Without options: print the table
of rooms. `--write` draws the picture, `--page` renews the table in that page."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlens.lab.studies.house import read_house, renew_table, table
from kvlens.lab.studies.housepicture import draw


def main() -> None:
    """Print the table, draw the picture or renew the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the picture, an SVG file")
    parser.add_argument("--page", type=Path, help="the Markdown page whose table is renewed")
    options = parser.parse_args()
    house = read_house()
    if options.write is not None:
        options.write.write_text(draw(house), encoding="utf-8")
    if options.page is not None:
        options.page.write_text(renew_table(options.page.read_text(encoding="utf-8"), house), encoding="utf-8")
    if options.write is None and options.page is None:
        print(table(house))


if __name__ == "__main__":
    main()
