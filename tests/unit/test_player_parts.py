"""The JavaScript of Replay's player and of Compare's: what both do stands in one file that both are made of."""

from __future__ import annotations

from importlib.resources import files

SHORT = 32
"""shorter lines may be alike by chance: a brace, a return"""


def lines(package: str, name: str) -> set[str]:
    text = (files(package) / name).read_text(encoding="utf-8")
    return {
        line.strip() for line in text.splitlines() if len(line.strip()) > SHORT and not line.strip().startswith("//")
    }


def test_what_both_players_do_is_written_once() -> None:
    alone, beside = lines("kvlens.app.ui.common.player", "player.js"), lines("kvlens.app.ui.compare.player", "pair.js")
    both = lines("kvlens.app.ui.common.player", "stepper.js")
    assert both
    assert alone & beside <= {"this.setStateValue = setStateValue;"}
    assert not both & (alone | beside)
