"""JavaScript modules joined to one script: each once, in order, no name twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlens.player.script import WEB, joined, modules

ROOT = Path(__file__).resolve().parents[2]
UI = ROOT / "kvlens/app/ui"
ENTRIES = (
    WEB / "page.js",
    UI / "common/player/component.js",
    UI / "common/player/store.js",
    UI / "common/savecanvas.js",
    UI / "common/savechart.js",
    UI / "home/story.js",
    UI / "compare/player/component.js",
    UI / "common/lanes/lanes.js",
)
DECLARED = re.compile(r"^(?:class|function|async function) (\w+)|^(?:const|let) (.*)", re.MULTILINE)
"""a class or function at the top of a module, or a line of constants"""


def declared(script: str) -> Iterator[str]:
    """Every name at the top of a script: of `const A = 1, B = 2` and of `const [A, B] = ...` both."""
    for name, constants in DECLARED.findall(script):
        if name:
            yield name
        elif constants.startswith(("[", "{")):
            yield from re.findall(r"\w+", constants.partition(" = ")[0])
        else:
            yield from re.findall(r"^(\w+)", constants)
            yield from re.findall(r", ([A-Z]\w*) = ", constants)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.parent.name}-{entry.stem}")
def test_modules_of_a_script_share_one_scope_without_a_clash(entry: Path) -> None:
    script, order = joined(entry), modules(entry)
    names = Counter(declared(script))
    assert names
    assert [name for name, times in names.items() if times > 1] == []
    assert order[-1] == entry
    assert len(order) == len(set(order))
    assert not re.search(r"^\s*import\b", script, re.MULTILINE)
    assert re.findall(r"^export .*", script, re.MULTILINE) == re.findall(
        r"^export default.*", entry.read_text(encoding="utf-8"), re.MULTILINE
    )


def test_a_module_comes_after_those_it_imports_and_once(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("export const A = 1;\n")
    (tmp_path / "b.js").write_text('import { A } from "./a.js";\nexport const B = A + 1;\n')
    (tmp_path / "c.js").write_text('import { A } from "./a.js";\nimport { B } from "./b.js";\nexport default A + B;\n')
    assert joined(tmp_path / "c.js") == "const A = 1;\n\nconst B = A + 1;\n\nexport default A + B;\n"


def test_every_module_of_the_player_is_in_some_script() -> None:
    reached = {path for entry in ENTRIES for path in modules(entry)}
    assert set(WEB.glob("*.js")) - reached == set()
