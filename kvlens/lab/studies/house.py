"""The rooms of kvlens and the imports between them, read from the sources.

`python -m kvlens.lab.studies.architecture` draws them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from kvlens import PACKAGE

STOREYS = ("core", "lab", "app")
"""from the ground up; a room imports from its own storey and from those below it"""
GROUND = "ground"
"""the room of the files directly in kvlens/ that import no room above them: typed rows, meta, statistics"""
TABLE = ("<!-- rooms: begin -->", "<!-- rooms: end -->")
"""what stands around the generated table in docs/architecture.md"""


@dataclass(frozen=True)
class House:
    """Rooms with their lines of code, and the rooms that each imports."""

    lines: dict[str, int]
    imports: dict[str, frozenset[str]]

    def storey(self, room: str) -> str:
        """Return core, lab or app."""
        folder = room.partition(".")[0]
        return folder if folder in STOREYS else "core"

    def arrows(self) -> dict[str, frozenset[str]]:
        """Return the imports without those that follow from others: a -> c is left out where a -> b -> c is drawn."""
        reached = {room: self._reach(room) for room in self.lines}
        return {
            room: frozenset(
                target for target in targets if not any(target in reached[between] for between in targets - {target})
            )
            for room, targets in self.imports.items()
        }

    def levels(self) -> dict[str, int]:
        """Return the height of every room: 0 imports no room, others stand one above the highest they import."""
        height: dict[str, int] = {}

        def measure(room: str) -> int:
            if room not in height:
                height[room] = 1 + max(map(measure, self.imports[room]), default=-1)
            return height[room]

        for room in self.lines:
            measure(room)
        return height

    def _reach(self, start: str) -> set[str]:
        reached: set[str] = set()
        stack = [start]
        while stack:
            for target in self.imports[stack.pop()] - reached:
                reached.add(target)
                stack.append(target)
        return reached


def read_house(package: Path = PACKAGE) -> House:
    """Read the rooms from the sources below `package` (kernels and store are links in it).

    A room is a folder directly in kvlens/, kvlens/lab/ or kvlens/app/. Files directly in kvlens/ are one room, the
    ground; those of them that import other rooms (the API) are rooms of their own."""
    sources = {module_name(path, package): path for path in package.rglob("*.py")}
    for link in sorted(path for path in package.rglob("*") if path.is_symlink() and path.is_dir()):
        sources |= {module_name(path, package): path for path in link.rglob("*.py")}
    modules = {name: path for name, path in sources.items() if room_of(name) is not None}
    imports: dict[str, set[str]] = defaultdict(set)
    lines: dict[str, int] = defaultdict(int)
    for name, path in sorted(modules.items()):
        room, text = str(room_of(name)), path.read_text(encoding="utf-8")
        lines[room] += len(text.splitlines())
        imports[room] |= {str(room_of(target)) for target in imported_modules(ast.parse(text), modules)} - {room}
    return merge_ground(House(dict(lines), {room: frozenset(imports[room]) for room in lines}), modules)


def merge_ground(house: House, modules: dict[str, Path]) -> House:
    """Merge the single files of the package into the ground, as far as none imports a folder other than text."""
    files = {room for room in house.lines if modules.get(f"kvlens.{room}", Path()).name == f"{room}.py"}
    ground = {room for room in files if house._reach(room) <= files | {"text"}}
    names = {room: GROUND if room in ground | {"text"} else room for room in house.lines}
    lines: dict[str, int] = defaultdict(int)
    imports: dict[str, frozenset[str]] = defaultdict(frozenset)
    for room, count in house.lines.items():
        lines[names[room]] += count
        imports[names[room]] |= frozenset(names[target] for target in house.imports[room]) - {names[room]}
    return House(dict(lines), dict(imports))


def module_name(path: Path, package: Path) -> str:
    """Return the full name of a module, kvlens.engine.loop of kvlens/engine/loop.py."""
    parts = list(path.relative_to(package.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """Return the room of a module; None for the packages kvlens, kvlens.lab and kvlens.app themselves."""
    parts = module.split(".")[1:]
    if not parts or parts in (["lab"], ["app"], ["__main__"]):
        return None
    return ".".join(parts[:2]) if parts[0] in ("lab", "app") else parts[0]


def imported_modules(tree: ast.Module, modules: dict[str, Path]) -> set[str]:
    """Return the modules of the product that a file imports, at any depth of the file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules else node.module for name in full}
    return names & set(modules)


def table(house: House) -> str:
    """Return the Markdown table of rooms, the app first: storey, room, lines, rooms imported."""
    arrows, levels = house.arrows(), house.levels()
    rows = ["| storey | room | lines | imports |", "| --- | --- | ---: | --- |"]
    for storey in reversed(STOREYS):
        rooms = [room for room in house.lines if house.storey(room) == storey]
        for room in sorted(rooms, key=lambda room: (-levels[room], room)):
            targets = ", ".join(f"`{target}`" for target in sorted(arrows[room]))
            rows.append(f"| {storey} | `{room}` | {house.lines[room]:,} | {targets} |")
    return "\n".join(rows)


def renew_table(page: str, house: House) -> str:
    """Return the text of docs/architecture.md with a new table between its two marks."""
    begin, end = TABLE
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{table(house)}\n{end}", page, flags=re.DOTALL)
