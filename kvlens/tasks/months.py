"""A long answer that lists months before it names a number of the prompt: 590 tokens of SmolLM2-135M."""

from __future__ import annotations

from kvlens.tasks.listed import Listed

NAMES = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
LAST = 1989
"""year whose January ends every list: its last digit stands nowhere else in one. Where December was the end, SmolLM2
went on or stopped years too early"""


class Months(Listed):
    """Months from January of a year to January 1989."""

    start, shown = 1982, (1985, 1984)
    new_tokens = 620

    def entries(self, start: int) -> list[str]:
        return [f"{name} {year}" for year in range(start, LAST) for name in NAMES] + [f"{NAMES[0]} {LAST}"]

    def wanted(self, start: int) -> str:
        return f"List the months from {NAMES[0]} {start} to {NAMES[0]} {LAST}"


MONTHS = Months("months", "months, then a fact", "one number, asked for behind a list of 85 months")
