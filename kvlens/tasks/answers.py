"""Whether an output holds an expected answer, for prompts without a task of their own.

The rule `contains`: the output without its thinking block holds the answer as whole words, letters of either case.
Text is compared in Unicode's composed form (NFC), numbers without separators of thousands. Scripts that write no spaces
between words (Chinese, Japanese, Korean, Thai and others) have no word borders.
"""

from __future__ import annotations

import re
import unicodedata

RULE = "contains"
"""name of the rule, as a run's meta has it"""
_THINKING = re.compile(r"\A.*?</think(?:ing)?>|<think(?:ing)?>.*\Z", re.DOTALL | re.IGNORECASE)
_WORD = re.compile(r"\w")
_THOUSANDS = re.compile(r"(?<=\d)[,'\u2019\u00a0\u202f\u2009](?=\d{3}(?!\d))")
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3130-\u318f\u3400-\u9fff\uac00-\ud7af"
    r"\uf900-\ufaff\U00020000-\U0003ffff]"
)


def contains(output: str, answer: str) -> bool:
    """Return whether an output holds the answer by the rule `contains`."""
    target, text = _plain(answer.strip()), _plain(without_thinking(output))
    if not target:
        return False
    return any(
        not _joined(text[: results.start()][-1:], target[0]) and not _joined(target[-1], text[results.end() :][:1])
        for results in re.finditer(re.escape(target), text)
    )


def without_thinking(output: str) -> str:
    """Return an output without its thinking block; an unfinished block holds no answer."""
    return _THINKING.sub("", output, count=1) if "<" in output else output


def _plain(text: str) -> str:
    composed = unicodedata.normalize("NFC", text).casefold()
    return _THOUSANDS.sub("", composed)


def _joined(text: str, right: str) -> bool:
    """Whether two neighbouring characters belong to one word."""
    if not (text and right and _WORD.match(text) and _WORD.match(right)):
        return False
    return not (_UNSPACED.match(text) or _UNSPACED.match(right))
