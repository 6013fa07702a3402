"""The rule `contains`: which outputs hold an expected answer."""

from __future__ import annotations

import pytest

from kvlens.tasks import judged, rule_of
from kvlens.tasks.answers import contains, without_thinking

HOLDS = [
    ("48213", "The code is 48213."),
    ("48213", "48,213"),
    ("48,213", "It is 48213"),
    ("48213", "密码是48213。"),
    ("48213", "答え：48213です"),
    ("四八二一三", "玛拉的密码是四八二一三。"),
    ("서울", "수도는 서울이다"),
    ("กรุงเทพ", "คือกรุงเทพครับ"),
    ("Dvo\u0159\u00e1k", "It is Dvor\u030ca\u0301k."),
    ("48213", "Here it is:\n\n48213"),
    ("48213", "<think>\nMaybe 7, maybe 9.\n</think>\n\nThe code is 48213."),
    ("48213", "Maybe 7.</think> 48213"),
    ("harbor", "HARBOR"),
]
LACKS = [
    ("48213", "4821"),
    ("48213", "148213"),
    ("48213", "x48213"),
    ("213", "48,213"),
    ("48213", "<think>It is 48213, or not"),
    ("48213", "<think>It is 48213.</think> I do not know."),
    ("art", "party"),
    ("48213", ""),
]


@pytest.mark.parametrize(("answer", "output"), HOLDS)
def test_outputs_that_hold_the_answer(answer: str, output: str) -> None:
    assert contains(output, answer)
    assert judged(None, answer, output) is True


@pytest.mark.parametrize(("answer", "output"), LACKS)
def test_outputs_that_do_not(answer: str, output: str) -> None:
    assert not contains(output, answer)


def test_text_without_a_thinking_block_stays() -> None:
    assert without_thinking("a\nb") == "a\nb"


def test_the_rule_has_a_name() -> None:
    assert rule_of(None) == rule_of("a plugin's that is gone") == "contains"
    assert rule_of("niah_single") == "task niah_single"
