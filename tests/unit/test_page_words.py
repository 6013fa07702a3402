"""Options of the command line in the words of the pages."""

from __future__ import annotations

import pytest

from kvlens.app.ui.common.pagewords import FIELDS, page_words


@pytest.mark.parametrize("option", FIELDS)
def test_an_option_is_called_by_its_field(option: str) -> None:
    said = page_words(f"raise --{option} to 3.")
    assert "--" not in said
    assert FIELDS[option] in said


def test_the_verb_fits_the_field() -> None:
    said = page_words("--segment takes one, --model takes one").split()
    assert (said[1], said[-2]) == ("take", "takes")
    assert page_words("--chat-arg needs one").split()[-2] == "need"


def test_a_parameter_keeps_its_value_and_what_is_no_option_stays() -> None:
    assert page_words("and --set keep=0.3 helps").split()[-2:] == ["keep=0.3", "helps"]
    assert "--" not in page_words("run with --some-thing 3")
    for text in ("a -- b", "well--known", "3 --- 4"):
        assert page_words(text) == text
