"""SCBench's official metrics, each 0..1, written anew from their definitions in github.com/microsoft/MInference,
scbench/compute_scores.py and scbench/repo_qa_utils.py; those it shares with InfiniteBench or RULER stand there.

repoqa compares code by BLEU-4 over words at white space, smoothed by Chen and Cherry's fourth technique (2014, section
3) as the library nltk has it (k = 5); `bleu` is that computation. Of the output's first code block the official metric
takes the first function that tree-sitter finds; here the block counts whole, which differs where there is more in it
than the function.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

BEST = 0.8
"""repoqa: the similarity from which on a function counts as found"""
GRAMS, SMOOTHING = 4, 5
_BLOCK = re.compile(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", re.DOTALL | re.MULTILINE)


def contains(output: str, answers: Sequence[str]) -> float:
    """Key-value, hops, prefix and suffix: the value stands in the output."""
    return float(answers[0] in output)


def any_name(output: str, answers: Sequence[str]) -> float:
    """Questions in English and many-shot: any of the answers stands in the output, upper and lower case alike.

    A many-shot answer is one text; the official loop goes over its characters.
    """
    return float(any(answer.upper() in output.upper() for answer in answers))


def find_number(output: str, answers: Sequence[str]) -> float:
    """The first number of the output is the answer; of a whole answer what stands behind the point is cut off."""
    match = re.search(r"\d+\.\d+|\d+", output)
    if match is None:
        return 0.0
    source, target = float(match.group()), float(answers[0])
    return float((source if "." in answers[0] else int(source)) == target)


def string_match_all(output: str, answers: Sequence[str]) -> float:
    """RULER's, rounded to two digits."""
    return round(sum(answer.lower() in output.lower() for answer in answers) / len(answers), 2)


def code_block(output: str) -> str:
    """The first code block between ``` of the output, or all of it."""
    match = _BLOCK.search(output.strip())
    return match.group(1) if match else output.strip()


def found_function(output: str, name: str, functions: Sequence[tuple[str, str]]) -> float:
    """repoqa, pass@1 at a similarity of 0.8: of the (name, code) asked for in the repository the one of `name` is most
    similar to the output, and similar enough."""
    source = code_block(output).split()
    best, score = "", 0.0
    for counterpart, code in functions:
        similar = bleu(code.split(), source)
        if similar > score:
            best, score = counterpart, similar
    return float(best == name and score >= BEST)


def bleu(target: Sequence[str], texts: Sequence[str]) -> float:
    """BLEU-4 of one sentence against one reference. An order without a match counts as 1 / (2^i k / ln(length)) of a
    match, i the how-manieth such order it is."""
    logs, missed = [], 0
    for order in range(1, GRAMS + 1):
        ours, theirs = (
            Counter(tuple(side[index : index + order]) for index in range(len(side) - order + 1))
            for side in (texts, target)
        )
        same: float = (ours & theirs).total()
        if not same and order == 1:
            return 0.0
        if not same and len(texts) > 1:
            missed += 1
            same = math.log(len(texts)) / (2**missed * SMOOTHING)
        if same:
            logs.append(math.log(same / max(1, ours.total())))
    short = 0.0 if len(texts) > len(target) else 1 - len(target) / len(texts)
    return math.exp(short + sum(logs) / GRAMS)
