"""Segmenters on one text: what the page computes of a stored run's own method is what the run recorded, for every
method."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import raises_code, task_prompt

from kvlens import methods
from kvlens.app.ui.spans import cuts as spancuts
from kvlens.app.ui.spans.cuts import Text
from kvlens.methods.base import Method
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.shape import KVShape
from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic

RUNS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "streaming": {"method": "streaming_llm", "budget": "0.3"},
    "streaming-whole": {"method": "streaming_llm", "budget": "1"},
    "sekv": {"method": "sekv", "budget": "0.5"},
    "sekv-paper": {"method": "sekv", "budget": "0.9", "overrides": {"segmentation": "paper", "alpha": "1.5"}},
    "sekv-chunks": {"method": "sekv", "budget": "0.6", "overrides": {"segmentation": "chunks", "l_max": "20"}},
    "sekv-no-anchors": {"method": "sekv", "budget": "0.6", "overrides": {"anchors": "false"}},
    "sentkv": {"method": "sentkv", "budget": "0.5"},
    "sentkv-free": {
        "method": "sentkv",
        "budget": "0.9",
        "overrides": {"length_control": "false", "marks": "full", "sinks": "0"},
    },
    "freekv": {"method": "freekv", "budget": "0.5"},
    "freekv-whole": {"method": "freekv", "budget": "1"},
    "chess": {"method": "chess"},
    "compresskv": {"method": "compresskv", "budget": "0.4"},
    "snapkv": {"method": "snapkv", "budget": "0.4"},
    "keydiff": {"method": "keydiff", "budget": "0.4"},
    "h2o": {"method": "h2o", "budget": "0.4"},
    "pyramidkv": {"method": "pyramidkv", "budget": "0.4"},
    "adakv": {"method": "adakv", "budget": "0.4"},
    "chunkkv": {"method": "chunkkv", "budget": "0.4"},
    "cake": {"method": "cake", "budget": "0.4"},
    "expected_attention": {"method": "expected_attention", "budget": "0.4"},
    "tova": {"method": "tova", "budget": "0.4"},
    "headkv": {"method": "headkv", "budget": "0.4"},
    "random": {"method": "random", "budget": "0.4"},
    "quest": {"method": "quest"},
    "sparq": {"method": "sparq"},
    "duoattention": {"method": "duoattention", "budget": "0.6"},
    "semanticache": {"method": "semanticache", "budget": "0.4"},
    "raas": {"method": "raas", "budget": "0.4"},
    "rocketkv": {"method": "rocketkv", "budget": "0.4"},
    "kivi": {"method": "kivi", "budget": "0.5"},
    "infinigen": {"method": "infinigen", "budget": "0.6"},
    "arkvale": {"method": "arkvale", "budget": "0.5"},
    "infllm": {"method": "infllm", "budget": "0.5"},
    "sentencekv": {"method": "sentencekv", "budget": "0.6"},
    "shadowkv": {"method": "shadowkv", "budget": "0.6"},
    "clusterkv": {"method": "clusterkv", "budget": "0.6"},
    "pqcache": {"method": "pqcache", "budget": "0.6"},
    **{name: {"method": name, "budget": "0.4"} for name in ("lagkv", "curdkv", "compactor", "criticalkv", "qfilters")},
    "simlayerkv": {"method": "simlayerkv", "budget": "0.4"},
    **{name: {"method": name, "budget": "0.6"} for name in ("keyformer", "rkv", "random_decode")},
    **{name: {"method": name, "budget": "0.5"} for name in ("turboquant", "layerbits")},
    **{name: {"method": name, "budget": "0.4"} for name in ("kvzip", "finch", "scorecut", "attention_matching")},
    **{name: {"method": name, "budget": "0.8"} for name in ("thinkkv", "minicache")},
    "loki": {"method": "loki", "budget": "0.6"},
    "magicpig": {"method": "magicpig"},
    "retroinfer": {"method": "retroinfer", "budget": "0.6"},
    "xkv": {"method": "xkv", "budget": "0.6"},
    "seer": {"method": "seer"},
    "tidaldecode": {"method": "tidaldecode", "overrides": {"tokens": 64}},
    "compresskv-whole": {"method": "compresskv", "budget": "1"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, demo: Any, loaded_once: None) -> tuple[Path, dict[str, str]]:
    """A folder with one stored run per entry of RUNS, and their ids."""
    folder = tmp_path_factory.mktemp("cut-runs")
    prompt, _ = task_prompt(demo, "needle", 300, max_new=3)
    uids = {}
    for name, asked in RUNS.items():
        request = RunRequest(**asked, max_new=3, ignore_eos=True, coverage=False)
        uids[name] = carry_out(request, prompt.source, folder, lambda *_: None, lambda: False)[0]
    return folder, uids


def recorded(reader: TraceReader) -> list[tuple[int, int, str]]:
    spans = reader.spans()
    first = spans[(spans["born_step"] < 0) & (spans["kind"] != "window")].sort_values("tok_start")
    return [
        (int(a), int(b), str(kind))
        for a, b, kind in zip(first["tok_start"], first["tok_end"], first["kind"], strict=True)
    ]


def test_every_method_that_says_its_cut_is_among_the_runs() -> None:
    says = {name for name in methods.BUILT_IN if methods.get(name).segments.__func__ is not Method.segments.__func__}
    assert {asked["method"] for asked in RUNS.values()} >= says


@pytest.mark.parametrize("name", RUNS)
def test_a_runs_own_cut_is_what_it_recorded(made: tuple[Path, dict[str, str]], name: str) -> None:
    folder, uids = made
    with TraceReader.open(folder, uids[name]) as reader:
        again = spancuts.own_cut(reader, Text.read(reader, reader.tokens()))
        assert again is not None
        assert [(span.tok_start, span.tok_end, span.kind) for span in again] == recorded(reader)
        assert len(again) > (0 if name == "streaming-whole" else 3)
        if name.partition("-")[0] not in methods.of_family("prompt_eviction"):  # reasons say what was kept of a page
            spans = reader.spans()
            said = dict(
                zip(
                    spans.loc[spans["kind"] != "window", "tok_start"],
                    spans["reason"][spans["kind"] != "window"],
                    strict=True,
                )
            )
            assert all(said[span.tok_start] == span.reason for span in again)


def test_the_same_parameters_give_the_same_preview_whatever_run_is_looked_at(made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    with TraceReader.open(folder, uids["sentkv"]) as reader, TraceReader.open(folder, uids["freekv"]) as other:
        named = {cut.name: cut for cut in spancuts.previews(other, Text.read(other, other.tokens()))}
        preview = named["sentence chunks (SentKVCompress)"]
        assert [(s.tok_start, s.tok_end, s.kind) for s in preview.spans] == recorded(reader)
        assert preview.settings == "length 20, deviation 8, marks auto, sinks 4"
    with TraceReader.open(folder, uids["chess"]) as reader:
        cuts = {cut.name: cut.spans for cut in spancuts.previews(reader, Text.read(reader, reader.tokens()))}
        config = reader.meta.config
        pages, chunks, grids = (cuts[f"{level} (CHESS)"] for level in ("pages", "chunks", "grids"))
        assert [(s.tok_start, s.tok_end, s.kind) for s in pages] == recorded(reader)
        assert chunks[0].tok_end == config["page"] * config["chunk_pages"]
        assert grids[0].tok_end == chunks[0].tok_end * config["grid_chunks"]
        assert pages[-1].tok_end == chunks[-1].tok_end == grids[-1].tok_end


def test_a_higher_threshold_has_fewer_boundaries_and_the_runs_own_alpha_has_its_own(
    made: tuple[Path, dict[str, str]],
) -> None:
    folder, uids = made
    with TraceReader.open(folder, uids["sekv-paper"]) as reader:
        text = Text.read(reader, reader.tokens())
        rule = spancuts.Threshold.choose(reader, text)
        assert rule is not None
        assert (rule.params.segmentation, rule.alpha) == ("paper", 1.5)
        usual = rule.cut(text, rule.alpha)
        assert [(s.tok_start, s.tok_end, s.kind) for s in usual.spans] == recorded(reader)
        counts = [len(rule.cut(text, alpha).spans) for alpha in (1.5, 2.5, 50.0)]
        assert counts[0] > counts[1] > counts[2] == 2  # sinks and one span
    with TraceReader.open(folder, uids["freekv"]) as reader:
        other = spancuts.Threshold.choose(reader, Text.read(reader, reader.tokens()))
        assert other is not None
        assert other.alpha == 1.0


def test_settings_that_are_not_this_versions_are_not_guessed(tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 4, 12, prompt_tokens=200)
    with TraceReader.open(tmp_path, uid) as reader:
        text = Text.read(reader, reader.tokens())
        assert spancuts.own_parameters(reader) is None
        assert spancuts.own_cut(reader, text) is None
        every = sum(len(methods.get(name).segmenters) for name in methods.registry())
        assert len(spancuts.previews(reader, text)) == every
        # The last prompt token is fed by step 0: no method cuts it.
        assert (text.prompt_tokens, len(text.surprisal), np.isnan(text.surprisal[0])) == (199, 199, True)


def test_a_surprisal_that_is_missing_is_one_sentence(tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 4, 12, prompt_tokens=200)
    with TraceReader.open(tmp_path, uid) as reader:
        frame = reader.tokens()
        frame.loc[7, "surprisal"] = np.nan
        with raises_code("not_finite", token=7):
            spancuts.previews(reader, Text.read(reader, frame))


def test_boundaries_inside_the_needle() -> None:
    assert spancuts.crossed({0, 10, 12, 15, 40}, [(10, 15), (39, 42)]) == [12, 40]
    assert spancuts.crossing_text([12, 40]) == "11|12, 39|40"
    assert spancuts.crossing_text([1, 2, 3, 4, 5, 6]) == "0|1, 1|2, 2|3, 3|4 and 2 more"


def test_where_a_papers_numbers_leave_nothing_to_cut_the_preset_that_fits_cuts() -> None:
    """500 tokens under a fifth of a real model's KV: the window of one paper covers all of them, and more than all
    that the budget holds."""
    shape = KVShape(layers=30, q_heads=9, kv_heads=3, head_dim=64, itemsize=4)
    drawn = np.random.default_rng(0)
    surprisal = (float("nan"), *drawn.gamma(2.0, 1.5, 499).tolist())
    words = tuple(str(word) for word in drawn.choice([" of", " the", ".", ",", " text"], 500))
    text = Text(shape, 500, 64, shape.full_kv_bytes(565) // 5, "smollm2", words, surprisal)
    reader: Any = SimpleNamespace(meta=SimpleNamespace(method="full", model="smollm2", config={}))
    cuts = spancuts.previews(reader, text)
    assert [cut.name for cut in cuts if not cut.spans] == []
    assert {cut.preset for cut in cuts if "SeKV" in cut.name} == {"fit"}
    rule = spancuts.Threshold.choose(reader, text)
    assert rule is not None
    assert len(rule.cut(text, rule.alpha).spans) > 5
