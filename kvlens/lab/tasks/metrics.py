"""The official metrics of RULER, LongBench and LongBench v2, each 0..1, written anew from their definitions.

Looked up in: RULER scripts/eval/synthetic/constants.py (string_match_all, string_match_part); LongBench
LongBench/metrics.py and eval.py (F1, ROUGE-L, classification, retrieval, count, code similarity; the best of a prompt's
answers counts); LongBench v2 pred.py and result.py (the letter behind 'The correct answer is'). Three of them call
libraries; what those do is written here, without the libraries: `rouge` (ROUGE-L on summary level), `fuzzywuzzy`
without its C extension (difflib's ratio, rounded to percent), and `jieba` for Chinese words, which alone has to be
installed (`zh_words` says so).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

from kvlens.tasks.base import Unscored
from kvlens.tasks.generated import string_match_all as string_match_all

_ZH_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢"
    "｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DROP = str.maketrans("", "", string.punctuation)
_DROP_ZH = str.maketrans("", "", string.punctuation + _ZH_PUNCTUATION)


def string_match_part(output: str, parts: Sequence[str]) -> float:
    """RULER's question answering: 1 when any of `parts` stands in the output."""
    return float(any(part.lower() in output.lower() for part in parts))


def normal_words(text: str) -> list[str]:
    """Lower case, without punctuation and articles, split at white space."""
    return _ARTICLES.sub(" ", text.lower().translate(_DROP)).split()


def f1(texts: Sequence[str], target: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of two bags of words; 0 when they share none."""
    same = sum((Counter(texts) & Counter(target)).values())
    if not same:
        return 0.0
    precision, recall = same / len(texts), same / len(target)
    return 2 * precision * recall / (precision + recall)


def qa_f1(output: str, answer: str) -> float:
    """F1 of normalized words."""
    return f1(normal_words(output), normal_words(answer))


def zh_words(text: str) -> list[str]:
    """Chinese words as jieba cuts them. Raises Unscored when jieba is not installed."""
    try:
        import jieba  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise Unscored(
            "this task's metric counts Chinese words as the package jieba cuts them, which is not installed.",
            code="package_missing",
            package="jieba",
        ) from None
    return list(jieba.cut(text, cut_all=False))


def zh_normal(text: str) -> str:
    """Lower case, without punctuation, Chinese or Latin, and without white space."""
    return "".join(text.lower().translate(_DROP_ZH).split())


def qa_f1_zh(output: str, answer: str) -> float:
    """LongBench: F1 of Chinese words."""
    source, target = ([word for word in map(zh_normal, zh_words(text)) if word] for text in (output, answer))
    return f1(source, target)


def common_subsequence(earlier: Sequence[str], second: Sequence[str], *, upward: bool) -> list[int]:
    """Places in `earlier` of one longest common subsequence with `second`. Several may be longest; going back from the
    end, `upward` prefers to drop from `second` unless dropping from `earlier` keeps more (the package rouge), else the
    other way (rouge_score)."""
    table = [[0] * (len(second) + 1) for _ in range(len(earlier) + 1)]
    for i, word in enumerate(earlier, 1):
        row, above = table[i], table[i - 1]
        for j, counterpart in enumerate(second, 1):
            row[j] = above[j - 1] + 1 if word == counterpart else max(above[j], row[j - 1])
    i, j, places = len(earlier), len(second), []
    while i and j:
        if earlier[i - 1] == second[j - 1]:
            places.append(i - 1)
            i, j = i - 1, j - 1
        elif (table[i - 1][j] > table[i][j - 1]) if upward else (table[i][j - 1] <= table[i - 1][j]):
            i -= 1
        else:
            j -= 1
    return places[::-1]


def rouge_l(output: str, answer: str) -> float:
    """ROUGE-L as LongBench has it (the package rouge): sentences end at full stops; distinct words of the union of each
    answer sentence's longest common subsequences with all output sentences, against the distinct words of either
    side."""
    source, target = (
        [" ".join(part.split()).split(" ") for part in text.split(".") if part] for text in (output, answer)
    )
    if not source or not target:
        return 0.0
    union: set[str] = set()
    for sentence in target:
        for counterpart in source:
            union |= {sentence[place] for place in common_subsequence(sentence, counterpart, upward=True)}
    precision, recall = (
        len(union) / len({word for sentence in side for word in sentence}) for side in (source, target)
    )
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(output: str, answer: str) -> float:
    """LongBench: ROUGE-L of Chinese words."""
    return rouge_l(" ".join(zh_words(output)), " ".join(zh_words(answer)))


def classification(output: str, answer: str, classes: Sequence[str]) -> float:
    """LongBench: 1 over the number of classes named in the output when the right one is among them, else 0. Classes
    that are a part of the right one's name do not count; as in the official loop, the class behind a dropped one is not
    looked at."""
    named = [name for name in classes if name in output]
    position = 0
    while position < len(named):
        if named[position] in answer and named[position] != answer:
            named.pop(position)
        position += 1
    return 1.0 / len(named) if answer in named else 0.0


def _number_share(output: str, wanted_name: str) -> float:
    numbers = re.findall(r"\d+", output)
    return numbers.count(wanted_name) / len(numbers) if numbers else 0.0


def count(output: str, answer: str) -> float:
    """LongBench's passage count: the share of the output's numbers that are the right one."""
    return _number_share(output, str(answer))


def retrieval(output: str, answer: str, label: str = "Paragraph ") -> float:
    """LongBench's passage retrieval: the share of the output's numbers that are the right paragraph's. Raises
    ValueError for an answer without a number."""
    results = re.search(re.escape(label) + r"(\d+)", answer)
    if results is None:
        raise ValueError(f"the answer {answer[:40]!r} names no paragraph.")
    return _number_share(output, results.group(1))


def retrieval_zh(output: str, answer: str) -> float:
    return retrieval(output, answer, "段落")


def code_similarity(output: str, answer: str) -> float:
    """LongBench: similarity of the output's first line that is neither markup nor a comment to the right line."""
    lines = output.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


def choice(output: str) -> str | None:
    """LongBench v2: the letter A to D behind 'The correct answer is', in brackets or not; None when there is none."""
    results = re.search(r"The correct answer is \(([A-D])\)", output.replace("*", "")) or re.search(
        r"The correct answer is ([A-D])", output.replace("*", "")
    )
    return results.group(1) if results else None
