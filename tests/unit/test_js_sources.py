"""The JavaScript that kvlens ships is checked as a whole, and its checks install the same packages everywhere."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES = 250


def test_every_script_is_type_checked_and_short() -> None:
    scripts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "kvlens").rglob("*.js")}
    assert scripts
    assert [path.name for path, text in scripts.items() if not text.startswith("// @ts-check\n")] == []
    assert [path.name for path, text in scripts.items() if "@ts-ignore" in text or "@ts-nocheck" in text] == []
    assert [path.name for path, text in scripts.items() if text.count("\n") > LINES] == []


def test_the_lock_file_names_versions_and_hashes_and_no_registry() -> None:
    lock = json.loads((ROOT / "package-lock.json").read_text(encoding="utf-8"))
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert packages
    assert [name for name, entry in packages.items() if "resolved" in entry] == []
    assert [name for name, entry in packages.items() if not {"version", "integrity"} <= entry.keys()] == []
    wanted = json.loads((ROOT / "package.json").read_text(encoding="utf-8"))["devDependencies"]
    assert {name: packages[f"node_modules/{name}"]["version"] for name in wanted} == wanted
