"""What people of every colour vision see of a colour, and how far two colours are apart: sRGB of D65, CIEDE2000."""

from __future__ import annotations

import math

import numpy as np

Color = tuple[float, float, float]
"""red, green, blue, 0..255"""

#: Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB; the last row is luminance alone (achromatopsia).
VISIONS = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
    "achromat": np.tile([0.2126, 0.7152, 0.0722], (3, 1)),
}
_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_WHITE = _XYZ.sum(axis=1)


def parse_color(text: str) -> Color:
    """Return a colour of CSS: '#0072B2' or 'rgb(0, 114, 178)'."""
    if text.startswith("#"):
        red, green, blue = (int(text[i : i + 2], 16) for i in (1, 3, 5))
    else:
        red, green, blue = (int(part) for part in text.strip("rgba() ").split(",")[:3])
    return float(red), float(green), float(blue)


def linear(color: Color) -> np.ndarray:
    """Return linear RGB, 0..1, of an sRGB colour."""
    values = np.array(color) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def luminance(color: Color) -> float:
    """Return relative luminance (WCAG 2)."""
    return float(linear(color) @ [0.2126, 0.7152, 0.0722])


def contrast(first: Color, second: Color) -> float:
    """Return the contrast of two colours (WCAG 2), 1..21."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def lab(color: Color, vision: str = "normal") -> np.ndarray:
    """Return CIELAB of what a person of a colour vision sees."""
    seen = np.clip(VISIONS[vision] @ linear(color), 0, 1)
    ratio = _XYZ @ seen / _WHITE
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(first: Color, second: Color, vision: str = "normal") -> float:
    """Return CIEDE2000 between two colours, as a person of a colour vision sees them (Sharma, Wu and Dalal 2005)."""
    (l1, a1, b1), (l2, a2, b2) = lab(first, vision), lab(second, vision)
    mean_chroma = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(mean_chroma**7 / (mean_chroma**7 + 25**7)))
    a1, a2 = (1 + g) * a1, (1 + g) * a2
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = math.degrees(math.atan2(b1, a1)) % 360, math.degrees(math.atan2(b2, a2)) % 360
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    dl, dc, dh = l2 - l1, c2 - c1, 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn) / 2)
    mean_l, mean_c = (l1 + l2) / 2, (c1 + c2) / 2
    mean_h = h1 + h2 if c1 * c2 == 0 else (h1 + turn / 2) % 360
    t = (
        1
        - 0.17 * math.cos(math.radians(mean_h - 30))
        + 0.24 * math.cos(math.radians(2 * mean_h))
        + 0.32 * math.cos(math.radians(3 * mean_h + 6))
        - 0.20 * math.cos(math.radians(4 * mean_h - 63))
    )
    sl = 1 + 0.015 * (mean_l - 50) ** 2 / math.sqrt(20 + (mean_l - 50) ** 2)
    sc, sh = 1 + 0.045 * mean_c, 1 + 0.015 * mean_c * t
    spread = 30 * math.exp(-(((mean_h - 275) / 25) ** 2))
    rotation = -math.sin(math.radians(2 * spread)) * 2 * math.sqrt(mean_c**7 / (mean_c**7 + 25**7))
    return math.sqrt((dl / sl) ** 2 + (dc / sc) ** 2 + (dh / sh) ** 2 + rotation * (dc / sc) * (dh / sh))
