"""The JavaScript of Replay's player and of Compare's: what both do stands in one file that both are made of."""

from __future__ import annotations

from pathlib import Path

from kvlens.player.script import WEB

ROOT = Path(__file__).resolve().parents[2]

SHORT = 32
"""shorter lines may be alike by chance: a brace, a return"""


def lines(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    return {
        line.strip()
        for line in text.splitlines()
        if len(line.strip()) > SHORT and not line.strip().startswith(("//", "/**", "import "))
    }


def test_what_both_players_do_is_written_once() -> None:
    alone, beside = lines(WEB / "player.js"), lines(ROOT / "kvlens/app/ui/compare/player/pair.js")
    both = lines(WEB / "stepper.js")
    assert both
    assert alone & beside <= {"this.setStateValue = setStateValue;"}
    assert not both & (alone | beside)
