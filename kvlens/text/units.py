"""Numbers in words: counts, bytes, durations."""

from __future__ import annotations

import math


def counted(n: float, text: str, many: str = "") -> str:
    """'1 page', '2,000 pages'. `many`: the plural where it is not `text` with an s."""
    return f"{n:,.0f} {text if n == 1 else many or text + 's'}"


def full_kv(dtype: str | None) -> str:
    """What a share is of: 'full KV in float32'. None: the number format was not recorded."""
    return f"full KV in {dtype}" if dtype else "full KV"


#: From this share of a unit on, three digits of the unit below would read 1e+03.
_ROUNDS_UP = 0.9995


def si_bytes(value: float | None) -> str:
    """Bytes in decimal units (1 MB = 10^6 bytes); None or NaN is 'not recorded'."""
    if value is None or not math.isfinite(value):
        return "not recorded"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= _ROUNDS_UP * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def duration(us: float) -> str:
    """Microseconds in the unit that suits them: '1.29 s', '612 ms', '40 us'; NaN is 'not recorded'."""
    if math.isnan(us):
        return "not recorded"
    if us >= 999.5e6:
        return f"{us / 1e6:,.0f} s"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= _ROUNDS_UP * size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.0f} µs"


def time_limit(seconds: float | None) -> str:
    """A limit of time: '600 s'; None is 'no limit'."""
    return "no limit" if seconds is None else f"{seconds:g} s"
