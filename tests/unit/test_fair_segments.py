"""Eviction that is fair to segments: every segment keeps the same share of its tokens, at the same total, its best ones
by the score; a what-if shows the shares before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from methodtrial import SHAPE, Trial
from support import raises_code
from test_cli import kvlens as command

import kvlens
from kvlens import methods
from kvlens.lens.fair import fair_table
from kvlens.methods.composition import SENSELESS, NoComposition
from kvlens.methods.families.fair_segments import fair_counts, segment_owners
from kvlens.refusal import Refusal

N, TOKENS = 203, 37
PARTS = (("instruction", 0, 20), ("documents", 20, 150), ("question", 150, 190))
HEADS = [(layer, kv_head) for layer in range(SHAPE.layers) for kv_head in range(SHAPE.kv_heads)]


@pytest.mark.parametrize(
    ("sizes", "least", "total", "counts"),
    [
        ([10, 30], [0, 0], 8, [2, 6]),
        ([10, 30, 60], [0, 0, 20], 28, [2, 6, 20]),
        ([10, 30, 60], [0, 0, 20], 50, [5, 15, 30]),
        ([1, 1, 1], [0, 0, 0], 2, [1, 1, 0]),
        ([4, 0, 4], [0, 0, 0], 4, [2, 0, 2]),
        ([10, 20, 10], [9, 0, 9], 20, [9, 2, 9]),
    ],
)
def test_each_segment_keeps_the_same_share_or_what_it_must(
    sizes: list[int], least: list[int], total: int, counts: list[int]
) -> None:
    assert fair_counts(sizes, least, total) == counts


def test_positions_without_a_name_are_one_segment_and_names_are_joined() -> None:
    segments = (("a", 0, 2), ("b", 3, 4), ("a", 5, 6), ("b", 6, 99))
    assert segment_owners(segments, 8) == [0, 0, 1, 2, 1, 0, 2, 2]


def test_each_segment_keeps_its_best_tokens_and_as_many_as_its_share() -> None:
    """KeyDiff's formula in float64, ranked inside each segment; the window is the last token alone."""
    trial = Trial("fair:keydiff", N, 5, tokens=TOKENS, segments=PARTS, window=0, peek=False)
    plain = Trial("keydiff", N, 5, tokens=TOKENS, window=0, peek=False)
    parts = [range(20), range(20, 150), range(150, 190), range(190, N)]
    counts = fair_counts([len(part) for part in parts], [0] * 4, TOKENS)
    assert sum(counts) == TOKENS
    differs = False
    for layer, head in HEADS:
        keys = trial.keys[layer, head]
        unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        score = -(unit @ unit.mean(0)) / np.linalg.norm(unit.mean(0))
        best = [
            sorted(part, key=lambda place: -score[place])[:count] for part, count in zip(parts, counts, strict=True)
        ]
        assert trial.lies(layer, head) == sorted(place for places in best for place in places)
        assert len(plain.lies(layer, head)) == TOKENS
        differs |= plain.lies(layer, head) != trial.lies(layer, head)
    assert differs


@pytest.mark.parametrize("name", ["fair:adakv", "adakv:fair:snapkv", "fair:criticalkv", "fair:pyramidkv", "fair:kvzip"])
def test_parts_compose(name: str) -> None:
    assert methods.get(name).family == "prompt_eviction"


def test_the_window_counts_for_its_segment() -> None:
    trial = Trial("fair:snapkv", N, 5, tokens=TOKENS, segments=(("start", 0, 180), ("end", 180, N)), window=11)
    for layer, head in HEADS:
        kept = trial.lies(layer, head)
        assert sum(place >= 180 for place in kept) == 10, "the window is more than the share of its segment"
        assert sum(place < 180 for place in kept) == TOKENS - 11


@pytest.mark.parametrize("name", ["fair:quest", "fair:h2o", "fair:chunk:snapkv", "fair:fair:snapkv", "fair:simlayerkv"])
def test_a_method_without_scores_to_divide_is_refused(name: str) -> None:
    with pytest.raises(NoComposition) as refused:
        methods.get(name)
    assert (refused.value.code, refused.value.part) == (SENSELESS, "fair")


def test_a_prompt_without_segments_is_refused() -> None:
    with raises_code("no_segments", Refusal, method="fair:snapkv"):
        Trial("fair:snapkv", N, 5, tokens=TOKENS)


def test_a_method_that_evicts_while_it_reads_is_refused() -> None:
    with raises_code("evicts_while_reading", Refusal, method="fair:keydiff"):
        Trial("fair:keydiff", N, 5, tokens=TOKENS, segments=PARTS, block=50)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    prompt = kvlens.sample("demo")
    middle = len(prompt.text) // 2
    settings: dict[str, Any] = {"model": "demo", "max_new": 8, "progress": False}
    named = {"first": (0, middle), "rest": (middle, len(prompt.text))}
    return kvlens.run(prompt, "snapkv", "20%", segments=named, runs=tmp_path_factory.mktemp("runs"), **settings)


def test_the_what_if_gives_segments_the_same_share_at_the_same_budget(run: Any) -> None:
    fair = run.fair()
    assert fair.meta.method == "fair:snapkv"
    assert fair.meta.changed == {"method": "fair:snapkv"}
    assert (fair.meta.parent, fair.meta.budget_bytes) == (run.uid, run.meta.budget_bytes)
    table = fair_table(run.reader, fair.reader).set_index("segment")
    spread = {name: table.loc[["first", "rest"], name] for name in ("kept_before", "kept_after")}
    assert np.ptp(spread["kept_after"]) < 0.02 < np.ptp(spread["kept_before"])
    weighed = [(table[name] * table["tokens"]).sum() for name in spread]
    assert weighed[0] == pytest.approx(weighed[1], rel=0.02), "as many tokens as before"
    with pytest.raises(kvlens.RequestError) as refused:
        fair.fair()
    assert refused.value.code == SENSELESS


def test_the_command_prints_each_segments_share(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command("whatif", run.uid, "--fair", "--runs", str(run.folder))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if "->" in line and "kept" in line]
    assert {row[0] for row in rows} >= {"first", "rest"}
    again = kvlens.open(lines[-1], runs=run.folder)
    assert again.meta.method == "fair:snapkv"


def test_a_run_without_segments_is_refused(tmp_path: Path) -> None:
    text = "one two three four five six seven eight nine ten " * 20
    plain = kvlens.run(text, "snapkv", "50%", model="demo", max_new=2, runs=tmp_path, progress=False)
    with pytest.raises(kvlens.RequestError) as refused:
        plain.fair()
    assert refused.value.code == "no_segments"
