"""Official metrics against values computed by hand."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from support import raises_code

from kvlens.lab.tasks import infinite_metrics as infinite
from kvlens.lab.tasks import metrics


def test_string_match() -> None:
    assert metrics.string_match_all("It is 12 and FOX.", ["12", "fox", "34", "cat"]) == 0.5
    assert metrics.string_match_part("Paris, France", ["london", "paris"]) == 1.0
    assert metrics.string_match_part("", ["london"]) == 0.0


def test_qa_f1() -> None:
    # given: [cat, sat, on, mat]; wanted: [cat, on, mat, slept]: 3 shared, precision 3/4, recall 3/4
    assert metrics.qa_f1("The cat sat on a mat!", "cat on the mat slept") == pytest.approx(0.75)
    # 'very very' against 'very': one shared, precision 1/2, recall 1 -> 2/3
    assert metrics.qa_f1("very very", "very") == pytest.approx(2 / 3)
    assert metrics.qa_f1("", "cat") == metrics.qa_f1("the", "a") == 0.0


def test_rouge_l() -> None:
    # wanted: 'the cat sat' / 'dogs run fast'; given: 'the cat ran' / 'dogs fast'.
    # union of subsequences: {the, cat} + {dogs, fast} = 4 of 6 distinct words wanted, of 5 distinct words given
    p, r = 4 / 5, 4 / 6
    assert metrics.rouge_l("the cat ran. dogs fast", "the cat sat. dogs run fast") == pytest.approx(
        2 * p * r / (p + r), abs=1e-7
    )
    # order counts: of 'a b c d' against 'd c b a' one word is common in order; 1 of 4 on both sides
    assert metrics.rouge_l("d c b a", "a b c d") == pytest.approx(0.25, abs=1e-7)
    # a word that is repeated counts once on either side
    assert metrics.rouge_l("go go go", "go") == pytest.approx(1.0, abs=1e-7)
    assert metrics.rouge_l("", "a") == metrics.rouge_l("x", "a") == 0.0


def test_rouge_l_of_one_sentence_is_the_longest_common_subsequence() -> None:
    # police killed the gunman / police kill the gunman (Lin 2004): 3 of 4 on both sides; 'the gunman kill police'
    # shares 2
    assert metrics.rouge_l("police kill the gunman", "police killed the gunman") == pytest.approx(0.75, abs=1e-7)
    assert metrics.rouge_l("the gunman kill police", "police killed the gunman") == pytest.approx(0.5, abs=1e-7)


def test_classification() -> None:
    classes = ["Food", "Food and drink", "Sport", "Color"]
    assert metrics.classification("Sport", "Sport", classes) == 1.0
    assert metrics.classification("Sport or Color", "Sport", classes) == 0.5
    assert metrics.classification("Food and drink", "Food and drink", classes) == 1.0, (
        "a part of the right name does not count"
    )
    assert metrics.classification("Color", "Sport", classes) == 0.0
    # 'A' is dropped, and by the official loop 'AB', the class behind it, is not looked at: 'AB' and 'ABC' are left
    assert metrics.classification("ABC", "ABC", ["A", "AB", "ABC"]) == 0.5


def test_numbers() -> None:
    assert metrics.count("There are 7 of them, not 8.", "7") == 0.5
    assert metrics.count("none", "7") == 0.0
    assert metrics.retrieval("Paragraph 12", "Paragraph 12") == 1.0
    assert metrics.retrieval("12, maybe 3 or 4", "Paragraph 12") == pytest.approx(1 / 3)
    assert metrics.retrieval("112", "Paragraph 12") == 0.0
    assert metrics.retrieval_zh("是段落5", "段落5") == 1.0
    with pytest.raises(ValueError, match="names no paragraph"):
        metrics.retrieval("1", "one")


def test_code_similarity() -> None:
    # ratio 2 M / T: 'ab = c' and 'ab = d' share 5 of 6 characters each -> 10/12 = 0.8333, rounded to percent
    assert metrics.code_similarity("```python\n# set it\nab = c\nmore", "ab = d") == 0.83
    assert metrics.code_similarity("x = 1", "x = 1") == 1.0
    assert metrics.code_similarity("# only a comment", "x = 1") == 0.0


def test_choice() -> None:
    assert metrics.choice("**The correct answer is (C)**, since") == "C"
    assert metrics.choice("The correct answer is B.") == "B"
    assert metrics.choice("I think A") is None
    assert metrics.choice("The correct answer is E") is None


def test_chinese_words_need_jieba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    with raises_code("package_missing", package="jieba"):
        metrics.qa_f1_zh("北京", "北京")
    fake = ModuleType("jieba")
    fake.cut = lambda text, cut_all: [text[at : at + 2] for at in range(0, len(text), 2)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jieba", fake)
    assert metrics.qa_f1_zh("北京上海", "北京") == pytest.approx(2 / 3)
    assert metrics.rouge_l_zh("北京上海", "北京天津") == pytest.approx(0.5, abs=1e-7)


def test_infinite_retrieval() -> None:
    assert infinite.first_number("The key is 123, not 45", ["123"]) == 1.0
    assert infinite.first_number("45 then 123", ["123"]) == infinite.first_number("", ["1"]) == 0.0
    assert infinite.key_value('{"a-b": "c-d"}', ["c-d"]) == 1.0
    assert infinite.key_value("c-dx", ["c-d"]) == 0.0


def test_infinite_numbers() -> None:
    assert infinite.code_run("The value is: -12.", ["-12"]) == 1.0
    assert infinite.code_run("twelve", ["12"]) == infinite.code_run("", ["12"]) == 0.0
    assert infinite.find_number("It is 17 of 20", ["17"]) == infinite.find_number("2.50", ["2.5"]) == 1.0
    assert infinite.find_number("17.5", ["17"]) == infinite.find_number("none", ["17"]) == 0.0
    assert infinite.calculation("[3, 8, 6, 1]", ["3", "8", "7", "1"]) == 0.5, "nothing counts behind the first mistake"


def test_infinite_choices() -> None:
    answers = ["the red door", "C"]
    assert infinite.choice("C. the red door", answers) == infinite.choice(" the red door", answers) == 1.0
    assert infinite.choice("B", answers) == infinite.choice("", answers) == 0.0
    assert infinite.choice("so the answer is: C", answers) == 1.0
    assert infinite.choice("it must be C then", answers) == 1.0
    assert (
        infinite.code_debug("B. is_even", ["is_even", "B"])
        == infinite.code_debug("The answer is: is_even", ["is_even", "B"])
        == 1.0
    )
    assert (
        infinite.code_debug("The answer is: A", ["is_even", "B"])
        == infinite.code_debug("no idea", ["is_even", "B"])
        == 0.0
    )
    assert infinite.dialogue("It was Anna.", ["ANNA"]) == 1.0
    assert infinite.dialogue("Annabel", ["ANNA"]) == 0.0


def test_infinite_texts() -> None:
    assert infinite.question("the red fox", ["a dog", "red fox"]) == 1.0
    # characters: 北京市 and 北京: 2 shared, precision 2/3, recall 1
    assert infinite.question_zh("北京市。", ["北京"]) == pytest.approx(0.8)
    # lines as sentences; hits: the, cat (line 1) and dogs (line 2) = 3; of 4 words given, of 5 wanted
    p, r = 3 / 4, 3 / 5
    assert infinite.rouge_lsum("The cat\ndogs bark", ["the cat sat\ndogs run"]) == pytest.approx(2 * p * r / (p + r))
    # a word counts no more often than the output has it
    p, r = 1 / 1, 1 / 2
    assert infinite.rouge_lsum("go", ["go\ngo"]) == pytest.approx(2 * p * r / (p + r))
    assert infinite.rouge_lsum("", ["a"]) == 0.0
