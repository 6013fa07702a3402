"""Budgets as people write them, what is said of those that are refused, and what they are called everywhere."""

from __future__ import annotations

import re

import pytest

from kvlens.budget import NO_LIMIT, Budget, BudgetInfeasible, distinct_budgets, in_words, of_run, percent_up, phrase
from kvlens.lens.knob import asked_in_words
from kvlens.lens.listing import budget_of
from kvlens.shape import KVShape

SHAPE = KVShape(2, 4, 2, 8, 4)
UNDERSTOOD = "is not understood: give a share of full KV (0.1 or 10%), tokens (512tok) or bytes (64MB)."


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("0.1", 0.1, "share"),
        (" 10% ", 0.1, "share"),
        ("57%", 0.57, "share"),
        ("1", 1.0, "share"),
        ("1.0", 1.0, "share"),
        ("100%", 1.0, "share"),
        ("512tok", 512, "tok"),
        ("64 MB", 64e6, "bytes"),
        ("2MiB", 2 * 2**20, "bytes"),
    ],
)
def test_what_is_understood(text: str, amount: float, unit: str) -> None:
    found = Budget.parse(text)
    assert (found.amount, found.unit) == (amount, unit)
    assert (found.bytes(SHAPE, 100) is None) == (amount == 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("20", "budget '20' is 20 times full KV: write 20% for a share of it, 20tok for tokens or 20MB for bytes."),
        (
            "1.5",
            "budget '1.5' is 1.5 times full KV: write 1.5% for a share of it, 1.5tok for tokens or 1.5MB for bytes.",
        ),
        ("512", "budget '512' is 512 times full KV: write 512tok for tokens or 512MB for bytes."),
        ("200%", "budget '200%' is more than full KV: 100% is no limit, give that or less."),
        ("0", "budget '0' gives no room: it must be above 0."),
        ("0%", "budget '0%' gives no room: it must be above 0."),
        ("-5%", "budget '-5%' gives no room: it must be above 0."),
        ("0MB", "budget '0MB' gives no room: it must be above 0."),
        ("a lot", f"budget 'a lot' {UNDERSTOOD}"),
        ("5 pages", f"budget '5 pages' {UNDERSTOOD}"),
    ],
)
def test_what_is_refused_with_its_own_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Budget.parse(text)


def test_what_a_refusal_says_would_do_is_understood() -> None:
    """More than full KV is needed, tables and summaries included: no limit is what would do."""
    assert [percent_up(share) for share in (0.2341, 0.9999, 1.078)] == ["0.235", "1.000", "1.000"]
    over, under = BudgetInfeasible("m", 100, 1078, 1000), BudgetInfeasible("m", 100, 235, 1000)
    assert "; raise --budget to 100% (no limit) or change the" in str(over)
    assert "; raise --budget to 23.5% or change the" in str(under)
    assert Budget.parse(over.would_do["budget"]).bytes(SHAPE, 100) is None


def test_equal_budgets_are_one() -> None:
    texts = ("7%", "0.07", "12.3%", "0.123", "100%", "1.0", "512tok", "512 tokens", "64MB", "64000000B", "64MiB")
    assert distinct_budgets(texts) == ("7%", "12.3%", "100%", "512tok", "64MB", "64MiB")
    assert distinct_budgets(("0.07", "8%"), ("7%",)) == ("8%",)
    with pytest.raises(ValueError, match="much"):
        distinct_budgets(("7%", "much"))


def test_one_budget_has_one_name() -> None:
    assert {in_words(text) for text in ("0.2", "20%", " 20.0 %")} == {"20%"}
    assert {in_words(text) for text in ("1", "1.0", "100%", None)} == {NO_LIMIT}
    assert [in_words(text) for text in ("9080832B", "9080832 b", "64MB", "64KiB")] == ["9,080,832 B"] * 2 + [
        "64MB",
        "64KiB",
    ]
    assert [in_words(text) for text in ("64MB", "512tok", "odd")] == ["64MB", "512tok", "odd"]
    assert (phrase(in_words("0.2")), phrase(in_words("1.0"))) == ("budget 20%", NO_LIMIT)
    assert (of_run("0.2", 5), of_run("1.0", None), of_run(None, None), of_run(None, 5)) == (
        "20%",
        NO_LIMIT,
        NO_LIMIT,
        "5 B",
    )
    assert of_run("200%", None) == NO_LIMIT, "an old run that was given more than there is"
    rows = ({"budget": "0.2", "budget_bytes": 5.0}, {"budget": "1.0", "budget_bytes": float("nan")}, {"budget": None})
    assert [budget_of(row) for row in rows] == ["20%", NO_LIMIT, ""]
    changes = (("budget", "0.3"), ("budget", "100%"), ("keep", "0.3"))
    assert [asked_in_words(*one) for one in changes] == ["budget 30%", NO_LIMIT, "keep 0.3"]
