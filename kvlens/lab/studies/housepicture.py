"""The picture of docs/architecture.md: rooms as boxes in three storeys, imports as arrows down."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from kvlens.lab.studies.house import STOREYS, House

BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT, BEND_WIDTH = 126, 38, 70, 2
GAP, MARGIN, STOREY_GAP = 18, 150, 30
"""pixels"""
FILLS = {"core": "#eef4fb", "lab": "#f3f7ec", "app": "#fdf3e7"}
STROKES = {"core": "#2f6db3", "lab": "#5b8a2d", "app": "#c0701c"}
TITLES = {"core": "runs, records, explains", "lab": "measures, calibrates, trains", "app": "shows"}
SWEEPS, ORDERING = 400, 60
"""passes that place each row by the mean place of its neighbours; the first of them order the rows too"""
STRAIGHT = 4
"""weight of a neighbouring bend, so that long arrows run straight"""


@dataclass(frozen=True)
class Drawing:
    """Rows of nodes from the top, and edges between nodes of neighbouring rows. A node is a room, or a bend
    (importer, target, row) where a long arrow passes a row."""

    rows: list[list[str]]
    edges: set[tuple[str, str]]
    paths: dict[tuple[str, str], list[str]]
    storeys: list[str]
    """the storey of each row"""


def arrange(house: House) -> Drawing:
    """Return the rooms in rows, each below all rooms that import it, the storeys one above the other."""
    arrows = house.arrows()
    levels = house.levels()
    row_of: dict[str, int] = {}
    storeys: list[str] = []
    for storey in reversed(STOREYS):
        rooms = [room for room in house.lines if house.storey(room) == storey]
        heights = sorted({levels[room] for room in rooms}, reverse=True)
        row_of |= {room: len(storeys) + heights.index(levels[room]) for room in rooms}
        storeys += [storey] * len(heights)
    rows: list[list[str]] = [[] for _ in storeys]
    for room in sorted(row_of):
        rows[row_of[room]].append(room)
    edges: set[tuple[str, str]] = set()
    paths: dict[tuple[str, str], list[str]] = {}
    for room in sorted(arrows):
        for target in sorted(arrows[room]):
            bends = [f"{room}>{target}@{row}" for row in range(row_of[room] + 1, row_of[target])]
            for row, bend in enumerate(bends, row_of[room] + 1):
                rows[row].append(bend)
            path = [room, *bends, target]
            paths[room, target] = path
            edges |= set(itertools.pairwise(path))
    return Drawing(rows, edges, paths, storeys)


def place_nodes(drawing: Drawing) -> dict[str, float]:
    """Return the x of every node: rows are ordered by the places of their neighbours, then spread without overlap."""
    neighbours: dict[str, list[str]] = defaultdict(list)
    for upper, lower in sorted(drawing.edges):
        neighbours[upper].append(lower)
        neighbours[lower].append(upper)
    places = {node: 0.0 for row in drawing.rows for node in row}
    for row in drawing.rows:
        spread(row, places)
    for sweep in range(SWEEPS):
        for row in drawing.rows if sweep % 2 else reversed(drawing.rows):
            for node in row:
                near = [
                    (places[neighbour], STRAIGHT if ">" in node and ">" in neighbour else 1)
                    for neighbour in neighbours[node]
                ]
                total = sum(weight for _, weight in near)
                places[node] = sum(place * weight for place, weight in near) / total if near else places[node]
            if sweep < ORDERING:
                row.sort(key=lambda node: (places[node], node))
            spread(row, places)
    return places


def spread(row: list[str], places: dict[str, float]) -> None:
    """Move the nodes of a row apart until no two overlap, each as little as possible (pooled least squares)."""
    offsets, offset = [], 0.0
    for number, node in enumerate(row):
        offset += (width(row[number - 1]) + width(node)) / 2 + GAP if number else 0.0
        offsets.append(offset)
    pools: list[tuple[float, int]] = []
    for node, offset in zip(row, offsets, strict=True):
        mean, size = places[node] - offset, 1
        while pools and pools[-1][0] > mean:
            lower_mean, lower_size = pools.pop()
            mean = (mean * size + lower_mean * lower_size) / (size + lower_size)
            size += lower_size
        pools.append((mean, size))
    means = [mean for mean, size in pools for _ in range(size)]
    for node, mean, offset in zip(row, means, offsets, strict=True):
        places[node] = mean + offset


def width(node: str) -> int:
    """Return the pixels that a node takes in its row."""
    return BEND_WIDTH if ">" in node else BOX_WIDTH


def draw(house: House) -> str:
    """Return the SVG."""
    drawing = arrange(house)
    places = place_nodes(drawing)
    leftmost = min(places[node] - width(node) / 2 for node in places)
    x = {node: place - leftmost + MARGIN for node, place in places.items()}
    y: dict[str, float] = {}
    bands: list[tuple[str, float, float]] = []
    top = 24.0
    for number, row in enumerate(drawing.rows):
        storey = drawing.storeys[number]
        if number == 0 or storey != drawing.storeys[number - 1]:
            bands.append((storey, top, top))
            top += STOREY_GAP
        y |= dict.fromkeys(row, top + BOX_HEIGHT / 2)
        top += ROW_HEIGHT
        bands[-1] = (storey, bands[-1][1], top - (ROW_HEIGHT - BOX_HEIGHT) / 2)
    full_width = max(x[node] + width(node) / 2 for node in x) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width:.0f} {top:.0f}" '
        'font-family="DejaVu Sans, Arial, sans-serif">',
        "<title>Rooms of kvlens and their imports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#5a6472"/></marker></defs>',
        f'<rect width="{full_width:.0f}" height="{top:.0f}" fill="#ffffff"/>',
    ]
    for storey, begin, end in bands:
        parts.append(
            f'<rect x="8" y="{begin:.0f}" width="{full_width - 16:.0f}" height="{end - begin:.0f}" rx="8" '
            f'fill="{FILLS[storey]}"/><text x="20" y="{begin + 22:.0f}" font-size="14" font-weight="bold" '
            f'fill="{STROKES[storey]}">{storey.upper()}<tspan x="20" dy="18" font-size="11" font-weight="normal">'
            f"{TITLES[storey]}</tspan></text>"
        )
    for (importer, _), path in sorted(drawing.paths.items()):
        parts.append(arrow(path, x, y, STROKES[house.storey(importer)]))
    parts += [box(room, house, x[room], y[room]) for room in sorted(house.lines)]
    return "\n".join([*parts, "</svg>", ""])


def arrow(path: list[str], x: dict[str, float], y: dict[str, float], color: str) -> str:
    """Return the curve from an importer's lower edge to its target's upper edge, through the bends between."""
    points = [(x[path[0]], y[path[0]] + BOX_HEIGHT / 2)]
    for bend in path[1:-1]:
        points += [(x[bend], y[bend] - BOX_HEIGHT / 2), (x[bend], y[bend] + BOX_HEIGHT / 2)]
    points.append((x[path[-1]], y[path[-1]] - BOX_HEIGHT / 2))
    commands = [f"M{points[0][0]:.0f},{points[0][1]:.0f}"]
    for number, ((remaining, above), (right, below)) in enumerate(itertools.pairwise(points)):
        if number % 2:
            commands.append(f"L{right:.0f},{below:.0f}")
        else:
            middle = (above + below) / 2
            commands.append(f"C{remaining:.0f},{middle:.0f} {right:.0f},{middle:.0f} {right:.0f},{below:.0f}")
    return (
        f'<path data-importer="{path[0]}" data-target="{path[-1]}" d="{" ".join(commands)}" fill="none" '
        f'stroke="{color}" stroke-width="1.2" marker-end="url(#tip)"/>'
    )


def box(room: str, house: House, middle: float, height: float) -> str:
    """Return a room's box: its name and its lines of code."""
    storey = house.storey(room)
    label = room if storey == "core" else room.partition(".")[2]
    return (
        f'<g data-room="{room}"><rect x="{middle - BOX_WIDTH / 2:.0f}" y="{height - BOX_HEIGHT / 2:.0f}" '
        f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="#ffffff" stroke="{STROKES[storey]}" '
        f'stroke-width="1.4"/><text x="{middle:.0f}" y="{height - 2:.0f}" font-size="13" text-anchor="middle" '
        f'fill="#1d2733">{label}</text><text x="{middle:.0f}" y="{height + 13:.0f}" font-size="10.5" '
        f'text-anchor="middle" fill="#5a6472">{house.lines[room]:,} lines</text></g>'
    )
