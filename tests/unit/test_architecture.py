"""The picture and the table of docs/architecture.md show the rooms and arrows of the sources."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path

from kvlens.lab.studies import house
from kvlens.lab.studies.house import House, renew_table, table
from kvlens.lab.studies.housepicture import arrange, draw, place_nodes, width

DOCS = Path(__file__).resolve().parents[2] / "docs"
SMALL = House(
    {"store": 10, "runs": 20, "lab.bench": 30, "app.ui": 40},
    {
        "store": frozenset(),
        "runs": frozenset({"store"}),
        "lab.bench": frozenset({"runs", "store"}),
        "app.ui": frozenset({"store"}),
    },
)


read_house = cache(house.read_house)
"""the sources are read once: they stay as they are while tests run"""


def drawn(picture: str) -> tuple[set[str], set[tuple[str, ...]]]:
    """Return the rooms and the arrows of a picture."""
    rooms = set(re.findall(r'data-room="([^"]+)"', picture))
    return rooms, set(re.findall(r'data-importer="([^"]+)" data-target="([^"]+)"', picture))


def without_lines(rows: str) -> list[str]:
    """Return the rows of a table of rooms without their line counts."""
    return [re.sub(r"\| [\d,]+ \|", "|", row) for row in rows.splitlines() if row.startswith("|")]


def test_the_committed_picture_shows_the_rooms_and_arrows_of_the_sources() -> None:
    committed = (DOCS / "architecture.svg").read_text(encoding="utf-8")
    assert drawn(committed) == drawn(draw(read_house()))


def test_the_committed_table_lists_the_rooms_and_arrows_of_the_sources() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    listed = page.partition("<!-- rooms: begin -->")[2].partition("<!-- rooms: end -->")[0]
    assert without_lines(listed) == without_lines(table(read_house()))


def test_the_house_has_the_three_storeys_and_only_arrows_down() -> None:
    whole = read_house()
    rank = {"core": 0, "lab": 1, "app": 2}
    assert {whole.storey(room) for room in whole.lines} == set(rank)
    assert {"engine", "kernels", "store", "ground", "lab.bench", "app.ui"} <= set(whole.lines)
    up = [
        (room, target)
        for room, targets in whole.imports.items()
        for target in targets
        if rank[whole.storey(target)] > rank[whole.storey(room)]
    ]
    assert up == []
    assert "memory" in whole.imports["methods"]


def test_an_arrow_that_follows_from_others_is_left_out() -> None:
    assert SMALL.arrows()["lab.bench"] == {"runs"}
    assert SMALL.arrows()["app.ui"] == {"store"}
    assert SMALL.levels() == {"store": 0, "runs": 1, "lab.bench": 2, "app.ui": 1}
    assert drawn(draw(SMALL)) == (
        {"store", "runs", "lab.bench", "app.ui"},
        {("runs", "store"), ("lab.bench", "runs"), ("app.ui", "store")},
    )


def test_no_two_boxes_of_a_row_overlap() -> None:
    drawing = arrange(read_house())
    places = place_nodes(drawing)
    for row in drawing.rows:
        for left, right in itertools.pairwise(row):
            assert places[right] - places[left] >= (width(left) + width(right)) / 2


def test_the_table_is_renewed_between_its_marks_alone() -> None:
    page = "above\n<!-- rooms: begin -->\nold\n<!-- rooms: end -->\nbelow\n"
    renewed = renew_table(page, SMALL)
    assert renewed.startswith("above\n")
    assert renewed.endswith("below\n")
    assert "old" not in renewed
    assert "| lab | `lab.bench` | 30 | `runs` |" in renewed
