"""Colours that have to be told apart, by everybody: CIEDE2000 under simulated deficiencies, and contrast of text."""

from __future__ import annotations

import re
import tomllib

import pytest
from colourvision import VISIONS, Color, contrast, distance, parse_color
from uiruns import ROOT

from kvlens.app.figures.states import STATE_COLORS
from kvlens.app.figures.theme import HOST, RESIDENT
from kvlens.player.script import WEB

LEAST = 30.0
"""of CIEDE2000, between what is in device memory and what is in host memory"""
TEXT = 4.5
"""contrast of text, WCAG 2.1 level AA"""
GROUNDS: dict[str, Color] = {"light": (255, 255, 255), "dark": (15, 20, 25)}


def paled(color: Color, ground: Color) -> Color:
    """As `pale` in kvlens/player/web/color.js mixes it."""
    share = float(re.search(r"const PALE = ([\d.]+)", (WEB / "color.js").read_text(encoding="utf-8")).group(1))
    red, green, blue = (round(share * value + (1 - share) * below) for value, below in zip(color, ground, strict=True))
    return red, green, blue


def test_distances_are_those_of_the_published_pairs() -> None:
    """Black and white are 100 apart; equal colours 0; a deficiency takes red and green together."""
    assert distance((0, 0, 0), (255, 255, 255)) == pytest.approx(100, abs=0.1)
    assert distance((12, 200, 90), (12, 200, 90), "deutan") == 0
    red, green = (200, 60, 60), (110, 120, 50)
    assert distance(red, green, "deutan") < distance(red, green) / 2
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("ground", GROUNDS)
def test_device_and_host_memory_are_told_apart_by_every_vision(vision: str, ground: str) -> None:
    resident, host = parse_color(RESIDENT), parse_color(HOST)
    assert distance(resident, host, vision) > LEAST
    assert distance(paled(resident, GROUNDS[ground]), paled(host, GROUNDS[ground]), vision) > LEAST


def test_the_states_of_the_two_tiers_have_these_colours() -> None:
    assert (STATE_COLORS["resident"], STATE_COLORS["cold"]) == (RESIDENT, HOST)


@pytest.mark.parametrize("ground", GROUNDS)
def test_text_of_the_themes_is_read_on_its_ground(ground: str) -> None:
    """Axes are written in the theme's text colour (kvlens.app.ui.common.chart.STYLE, kvlens/player/web/color.js)."""
    theme = tomllib.loads((ROOT / "kvlens/app/config.toml").read_text(encoding="utf-8"))["theme"][ground]
    assert parse_color(theme["backgroundColor"]) == GROUNDS[ground]
    for below in ("backgroundColor", "secondaryBackgroundColor"):
        assert contrast(parse_color(theme["textColor"]), parse_color(theme[below])) >= TEXT
