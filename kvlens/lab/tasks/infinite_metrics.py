"""InfiniteBench's official metrics, each 0..1, written anew from their definitions in github.com/OpenBMB/InfiniteBench,
src/compute_scores.py. Its ROUGE-Lsum comes from the library rouge_score by way of evaluate; what that computes is
written here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from kvlens.lab.tasks.metrics import common_subsequence, f1, qa_f1, zh_normal

_WORD_MARKS = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))
_RUN_MARKS = str.maketrans(dict.fromkeys("\n.`'\":", " "))
_CHOICE_MARKS = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))


def first_number(output: str, answers: Sequence[str]) -> float:
    """Passkey and number string: the first run of digits is the answer."""
    match = re.search(r"[0-9]+", output)
    return float(match is not None and match.group() == answers[0])


def key_value(output: str, answers: Sequence[str]) -> float:
    """The value stands in the output as a word."""
    return float(answers[0] in output.translate(_WORD_MARKS).split())


def code_run(output: str, answers: Sequence[str]) -> float:
    """The output's last word is the number."""
    words = output.strip().translate(_RUN_MARKS).split()
    try:
        return float(bool(words) and int(words[-1]) == int(answers[0]))
    except ValueError:
        return 0.0


def code_debug(output: str, answers: Sequence[str]) -> float:
    """`answers`: the function's name and its letter. The output begins with the letter, or names either behind an
    announcement."""
    name, letter = answers[0], answers[1]
    text = output.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        text = text.replace(mark, " ")
    return (
        _announced(re.sub(" +", " ", text), ("answer is:", "is:", "answer:", "correct option is:"), (letter, name))
        or 0.0
    )


def choice(output: str, answers: Sequence[str]) -> float:
    """Multiple choice on a book; `answers`: the option's text and its letter."""
    text = output.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in answers)
    if text in answers:
        return 1.0
    text = re.sub(" +", " ", text.translate(_CHOICE_MARKS))
    grade = _announced(text, ("answer is:", "answer:", "answer is", "option is"), answers)
    if grade is not None:
        return grade
    letter = next((word for word in text.split() if word in "ABCD"), None)
    return float(letter is not None and letter in answers)


def _announced(text: str, announcements: Sequence[str], answers: Sequence[str]) -> float | None:
    """Whether one of `answers` follows the first announcement there is, a character apart; None when nothing is
    announced."""
    for announcement in announcements:
        place = text.find(announcement)
        if place >= 0:
            return float(any(text[place + len(announcement) + 1 :].startswith(answer) for answer in answers))
    return None


def dialogue(output: str, answers: Sequence[str]) -> float:
    """The masked character's name stands in the output as a word, in capitals or not."""
    return float(answers[0] in [word.upper() for word in output.strip().translate(_WORD_MARKS).split()])


def find_number(output: str, answers: Sequence[str]) -> float:
    """The first number of the output is the answer; an answer without a point wants a whole number."""
    match = re.search(r"\d+\.\d+|\d+", output)
    if match is None:
        return 0.0
    if "." in answers[0]:
        return float(float(match.group()) == float(answers[0]))
    return float("." not in match.group() and int(match.group()) == int(answers[0]))


def calculation(output: str, answers: Sequence[str]) -> float:
    """The share of the intermediate values that are right before the first that is not."""
    numbers = re.findall(r"[0-9]+", output)
    right = 0
    for number, answer in zip(numbers, answers, strict=False):
        if int(number) != int(answer):
            break
        right += 1
    return right / len(answers)


def question(output: str, answers: Sequence[str]) -> float:
    """F1 of normalized words, the best of the answers."""
    return max(qa_f1(output, answer) for answer in answers)


def question_zh(output: str, answers: Sequence[str]) -> float:
    """F1 of characters, the best of the answers."""
    return max(f1(list(zh_normal(output)), list(zh_normal(answer))) for answer in answers)


def rouge_lsum(output: str, answers: Sequence[str]) -> float:
    """ROUGE-Lsum without stemming, the best of the answers: sentences are lines; words of letters a-z and digits, lower
    case."""
    return max(_rouge_lsum(output, answer) for answer in answers)


def _rouge_lsum(output: str, answer: str) -> float:
    output_lines, answer_lines = (
        [words for line in text.split("\n") if (words := re.findall(r"[a-z0-9]+", line.lower()))]
        for text in (output, answer)
    )
    output_counts, right = (Counter(word for line in side for word in line) for side in (output_lines, answer_lines))
    if not output_counts or not right:
        return 0.0
    sizes, hits = (output_counts.total(), right.total()), 0
    for line in answer_lines:
        places = sorted(
            {place for output_line in output_lines for place in common_subsequence(line, output_line, upward=False)}
        )
        for place in places:
            if output_counts[line[place]] > 0 and right[line[place]] > 0:
                hits += 1
                output_counts[line[place]] -= 1
                right[line[place]] -= 1
    precision, recall = hits / sizes[0], hits / sizes[1]
    return 2 * precision * recall / (precision + recall) if hits else 0.0
