"""What is said of a span that a KV head evicted whole: what this KV head kept, what the others kept, and the rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kvlens
from kvlens.lens.dropped import distinct
from kvlens.lens.reasons import explain
from kvlens.store.reader import TraceReader

pytestmark = pytest.mark.usefixtures("loaded_once")
OTHERS = re.compile(r"Other KV heads kept (\d+) to (\d+); (\d+) of (\d+) kept none")


def evicted(reader: TraceReader) -> list[tuple[int, int, int]]:
    """Layer, KV head and span of all that is evicted at step 0."""
    found = []
    for layer in range(reader.n_layers):
        for head in range(reader.kv_heads):
            states = reader.span_states(0, layer, head)
            gone = states.loc[states["state"] == "evicted", "span"]
            found += [(layer, head, int(span)) for span in gone]
    return found


def demo_run(folder: Path, method: str, budget: str, **parameters: Any) -> TraceReader:
    """A run of the demo model on its sample."""
    prompt = kvlens.sample("demo")
    run = kvlens.run(
        prompt, method, budget, model="demo", max_new=2, runs=folder, progress=False, against_full=False, **parameters
    )
    return TraceReader.open(folder, run.uid)


def test_a_score_is_given_with_what_the_other_kv_heads_kept(tmp_path: Path) -> None:
    with demo_run(tmp_path, "snapkv", "20%") as reader:
        triples, heads = evicted(reader), reader.n_layers * reader.kv_heads
        assert triples
        told = 0
        for layer, head, span in triples[:: max(1, len(triples) // 12)]:
            says, row = explain(reader, 0, layer, head, span).says, reader.span(span)
            size = row.tok_end - row.tok_start
            assert says.startswith(f"L{layer} KV{head} ")
            assert says.count(f" {size} tokens") == 1, "the number is given once"
            none = sum(1 for other in triples if other[2] == span)
            (found,) = OTHERS.findall(says)
            assert (int(found[2]), int(found[3])) == (none, heads)
            assert 0 <= int(found[0]) <= int(found[1]) <= size
            told += int(found[1]) > 0
        assert told, "some KV head kept a part of some span"


def test_a_position_is_given_as_the_rule_of_the_method(tmp_path: Path) -> None:
    with demo_run(tmp_path, "streaming_llm", "20%", sinks=3) as reader:
        layer, head, span = evicted(reader)[0]
        says = explain(reader, 0, layer, head, span).says
        assert reader.span(span).reason.rstrip(".") not in says, "how the text was cut is no reason"
        assert "3 sinks" in says


@pytest.mark.parametrize(
    ("score", "cut", "shown"),
    [
        (0.44719, 0.48, ("0.447", "0.48")),
        (0.0049112, 0.0049137, ("0.004911", "0.004914")),
        (0.5, 0.5, ("0.5", "0.5")),
        (0.25, float("nan"), ("0.25", "")),
    ],
)
def test_two_scores_have_the_digits_that_tell_them_apart(score: float, cut: float, shown: tuple[str, str]) -> None:
    assert distinct(score, cut) == shown
