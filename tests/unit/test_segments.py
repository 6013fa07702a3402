"""Named parts of a prompt: found by template, marker and hand, carried by the trace, told of by the lens."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvlens
from kvlens.lens.attribution import attribute, missed
from kvlens.lens.segments import acting_layers, eviction_sentences, segment_ranges, segment_table, segments_of
from kvlens.store.reader import TraceReader
from kvlens.text.messages import read_conversation
from kvlens.text.prompts import PromptText, segmented, tokenize
from kvlens.text.segments import BadSegment, Segment, find_segments, pairs_of, token_segments
from tests.synthetic import write_synthetic

TEXT = "Rules: be brief. Documents: a b c. Ask: what?"


def test_markers_and_ranges_name_parts_of_a_text() -> None:
    assert find_segments(pairs_of(["rules=Rules:", "documents=Documents:"]), TEXT) == (
        Segment("rules", 0, 17),
        Segment("documents", 17, len(TEXT)),
    )
    assert find_segments(pairs_of(["documents= Documents: "]), TEXT) == (Segment("documents", 17, len(TEXT)),)
    assert find_segments(pairs_of(["b=\nB "]), "a B \nB c") == (Segment("b", 4, 8),)
    assert find_segments(pairs_of(["brief=7:16"]), TEXT) == (Segment("brief", 7, 16),)
    assert find_segments([("brief", (7, 16))], TEXT) == (Segment("brief", 7, 16),)


@pytest.mark.parametrize(
    ("items", "code", "values"),
    [
        (["rules=Nowhere"], "segment_not_found", {"name": "rules", "marker": "Nowhere"}),
        (["rules=7:900"], "segment_outside", {"name": "rules", "start": 7, "end": 900}),
        (["rules=9:9"], "segment_outside", {"name": "rules", "start": 9, "end": 9}),
        (["rules"], "bad_segment", {"given": "rules"}),
        (["=Rules:"], "bad_segment", {"given": ""}),
        (["a="], "bad_segment", {"given": "a="}),
        (["a= "], "bad_segment", {"given": "a= "}),
        (["a=Rules:", "a:b=Ask:"], "bad_segment", {"given": "a:b"}),
        (["a=Rules:", "a=Ask:"], "bad_segment", {"given": "a"}),
        ([f"s{n}=Rules:" for n in range(65)], "bad_segment", {"given": 65}),
    ],
)
def test_what_is_not_in_the_prompt_is_refused_with_a_code(items: list[str], code: str, values: dict[str, Any]) -> None:
    with pytest.raises(BadSegment) as refused:
        find_segments(pairs_of(items), TEXT)
    assert (refused.value.code, refused.value.values) == (code, values)


@pytest.mark.parametrize(
    ("items", "question"), [(["ask=35:40"], 35), (["outer=0:10", "a=0:5", "b=5:10"], None), (["late=Ask:"], 30)]
)
def test_a_segment_that_others_cover_is_refused_before_the_model_is_loaded(
    items: list[str], question: int | None
) -> None:
    with pytest.raises(BadSegment) as refused:
        segmented(PromptText(TEXT, question=question), items)
    assert (refused.value.code, refused.value.values) == ("bad_segment", {"given": items[0].partition("=")[0]})
    assert segmented(PromptText(TEXT, question=40), items[-1:]).segments


@pytest.mark.parametrize("place", ["", (), (1,), (1, 2, 3), (0.9, 2.7), (None, 3), 5, 1.5, True, None, {"a": 1}])
def test_a_place_is_a_marker_or_two_whole_numbers(place: Any) -> None:
    with pytest.raises(BadSegment) as refused:
        find_segments([("a", place)], TEXT)
    assert (refused.value.code, refused.value.values) == ("bad_segment", {"given": "a"})


def test_a_marker_may_look_like_a_range() -> None:
    assert find_segments([("noon", "12:30")], "At 12:30 we eat.") == (Segment("noon", 3, 16),)
    assert pairs_of(["noon=12:30"]) == [("noon", (12, 30))]


def words(text: str, **settings: Any) -> dict[str, Any]:
    """A fast tokenizer with a token per character."""
    offsets = [(place, place + 1) for place in range(len(text))]
    return {"input_ids": [ord(letter) for letter in text], "offset_mapping": offsets}


words.is_fast = True  # type: ignore[attr-defined]
words.decode = lambda ids, **settings: "".join(map(chr, ids))  # type: ignore[attr-defined]


def test_the_inner_segment_keeps_its_tokens() -> None:
    named = find_segments([("inner", (10, 14)), ("outer", (10, 30))], TEXT)
    prompt = tokenize(PromptText(TEXT, segments=named), words, None, 1)
    assert [(part.name, part.start, part.end) for part in prompt.segments] == [
        ("text", 0, 10),
        ("inner", 10, 14),
        ("outer", 14, 30),
        ("text", 30, len(TEXT)),
    ]


@pytest.mark.parametrize(
    ("named", "question"),
    [({"a": "Rules:", "b": "Rules:"}, None), ({"b": (0, 5), "a": (0, 5)}, None), ({"a": (30, 40)}, 29)],
)
def test_a_segment_without_a_token_is_refused(named: dict[str, Any], question: int | None) -> None:
    text = PromptText(TEXT, question=question, segments=find_segments(list(named.items()), TEXT))
    with pytest.raises(BadSegment) as refused:
        tokenize(text, words, None, 1)
    assert refused.value.code == "bad_segment"
    assert refused.value.values["given"] in named


def test_every_token_has_one_name_by_template_turns_thinking_marks_and_question() -> None:
    before = "<s>sys: Be kind.</s><u>Hi</u><a><think>hm</think>Hello</a><u>"
    text, fed = "Rules. Why?", ""
    fed = before + text + "</u>"
    ranges = [(place, place + 1) for place in range(len(fed))]
    at = len(before)
    segments = token_segments(
        ranges,
        before,
        (at, at + len(text)),
        [Segment("rules", at, at + 6)],
        at + 7,
        "Be kind.",
        [("user", "Hi"), ("assistant", "<think>hm</think>Hello")],
        True,
    )
    named = [(part.name, fed[part.start : part.end]) for part in segments]
    assert named == [
        ("template", "<s>sys: "),
        ("system", "Be kind."),
        ("template", "</s><u>"),
        ("turn 1 user", "Hi"),
        ("template", "</u><a>"),
        ("thinking", "<think>hm</think>"),
        ("turn 2 assistant", "Hello"),
        ("template", "</a><u>"),
        ("rules", "Rules."),
        ("text", " "),
        ("question", "Why?"),
        ("template", "</u>"),
    ]
    assert token_segments(ranges, "", (0, len(fed)), [], None, None, (), False) == ()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of the demo model that loses, with three parts."""
    folder = tmp_path_factory.mktemp("runs")
    sample = kvlens.sample("demo")
    third = len(sample.source.text) // 3 if hasattr(sample, "source") else len(sample.text) // 3
    parts = {"first": (0, third), "rest": (third, 3 * third)}
    return kvlens.run(sample, "snapkv", "40%", model="demo", max_new=8, segments=parts, runs=folder, progress=False)


def test_a_run_records_its_segments_and_its_repeats_keep_them(run: Any) -> None:
    names = [name for name, _, _ in run.meta.segments]
    assert names[:2] == ["first", "rest"]
    ends = [(start, end) for _, start, end in run.meta.segments]
    assert all(left[1] == right[0] for left, right in pairwise(ends))
    repeat = run.hold(segment="first", progress=False)
    assert repeat.meta.segments == run.meta.segments
    assert repeat.meta.segment_ranges == run.meta.segment_ranges
    start, end = segment_ranges(run.reader, "first")[0]
    assert sum(hold.tok_end - hold.tok_start for hold in repeat.meta.hold) == end - start
    with pytest.raises(kvlens.RequestError) as refused:
        run.hold(segment="second")
    assert refused.value.code == "unknown_segment"


def test_kept_and_evicted_shares_are_those_of_the_tokens(run: Any) -> None:
    """SnapKV keeps or drops each prompt token for good: shares weighted by tokens give the tokens that it attends."""
    table, reader = run.segments(), run.reader
    assert np.allclose(table["kept_share"] + table["evicted_share"], 1)
    prompt = table["tokens"].sum()
    kept = float((table["kept_share"] * table["tokens"]).sum())
    attended = run.kv_steps()
    last = attended[attended["step"] == attended["step"].max()]["attended_tokens"].mean()
    generated = reader.n_steps - 1
    assert kept == pytest.approx(last - generated, abs=1.5)
    assert kept < 0.6 * prompt
    assert set(table["heads"]) == {reader.n_layers * reader.kv_heads}


def test_masses_of_all_segments_are_those_of_all_spans(run: Any) -> None:
    table = run.segments()
    spans = [int(span) for span in run.spans().query("kind != 'window'")["span"]]
    full, mass = (float(np.nanmean(values)) for values in run.reader.mass_on_spans(spans))
    assert table["full_mass"].sum() == pytest.approx(full, abs=0.01)
    assert table["mass"].sum() == pytest.approx(mass, abs=0.01)


def test_effects_of_different_rounds_are_not_added(tmp_path: Path) -> None:
    """The lead is lost once: effects that rounds measured one after another may add up to more."""
    uid = write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, prompt_tokens=200, segments=[["all", 0, 200]])
    with TraceReader.open(tmp_path, uid) as reader:
        triples, table = attribute(reader), segment_table(reader)
        window = set(reader.spans().query("kind == 'window'")["span"])
    effects = triples.loc[~triples["span"].isin(window) & (triples["effect"] > 0), "effect"]
    assert len(effects) > 1
    assert table["largest_effect"].tolist() == pytest.approx([effects.max()])


def test_a_segment_that_the_window_holds_whole_has_no_recorded_mass(tmp_path: Path) -> None:
    sample = kvlens.sample("demo")
    run = kvlens.run(sample, "snapkv", "60%", model="demo", window=64, max_new=2, runs=tmp_path, progress=False)
    table = run.segments().set_index("segment")
    question = table.loc["question"]
    assert (question["kept_share"], question["evicted_share"]) == (1, 0)
    assert np.isnan(question[["full_mass", "mass"]].astype(float)).all()
    assert table["full_mass"].notna().any(), "other segments have theirs"


def test_segments_may_be_named_after_the_run(run: Any) -> None:
    table = run.segments(start=(0, 40))
    assert list(table["segment"]) == ["start"]
    with pytest.raises(kvlens.RequestError) as refused:
        run.segments(start="no such words")
    assert refused.value.code == "segment_not_found"


def test_segments_named_after_the_run_share_no_token(run: Any) -> None:
    end = len(run.reader.prompt_text())
    table = run.segments(a=(0, 300), b=(200, end)).set_index("segment")["tokens"]
    whole = run.segments(c=(0, end)).set_index("segment")["tokens"]
    assert table.sum() == whole["c"]
    start = run.meta.question_start
    if start is not None:
        with pytest.raises(kvlens.RequestError) as refused:
            run.segments(asked=(start + 1, end))
        assert refused.value.code == "bad_segment"
    recorded = run.segments(first=(0, 40), inner=(10, 20)).set_index("segment")["tokens"]
    assert recorded["first"] + recorded["inner"] == run.segments(first=(0, 40))["tokens"][0]


def test_a_sentence_counts_the_kv_heads_that_lost_a_segment_whole(run: Any) -> None:
    with TraceReader.open(run.folder, run.uid) as reader:
        table = segment_table(reader)
        assert acting_layers(reader) == list(range(reader.n_layers))
        assert segments_of(reader).keys() == {"first", "rest"} | set(table["segment"])
    table.loc[0, "evicted_heads"] = 7
    table.loc[1, "evicted_heads"] = 0
    sentences = eviction_sentences(table, "snapkv")
    assert eviction_sentences(table, "full") == []
    assert len(sentences) == 1
    assert f"7 of {table['heads'][0]}" in sentences[0]


def test_a_file_of_messages_is_a_conversation_with_segments(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": TEXT},
    ]
    file.write_text(json.dumps({"messages": messages, "answer": "c", "segments": {"rules": "Rules:", "end": [35, 40]}}))
    talk = read_conversation(file)
    assert (talk.system, talk.turns) == ("Be kind.", (("user", "Hi"), ("assistant", "Hello")))
    assert (talk.prompt.text, talk.prompt.answer) == (TEXT, "c")
    assert talk.prompt.segments == (Segment("rules", 0, len(TEXT)), Segment("end", 35, 40))


@pytest.mark.parametrize(("reference", "name"), [(True, "full KV's mass"), (False, "full attention's mass")])
def test_the_page_names_full_kvs_mass_only_where_it_was_recorded(
    run: Any, monkeypatch: pytest.MonkeyPatch, reference: bool, name: str
) -> None:
    from kvlens.app.ui.spans import segments as page

    shown: list[pd.DataFrame] = []
    table, facts = run.segments().rename(columns={"largest_effect_logits": "largest_effect"}), run.meta
    reader = SimpleNamespace(meta=facts, uid=run.uid, stamp=0, has_reference_masses=lambda: reference)
    monkeypatch.setattr(page, "_table", lambda *_: table)
    monkeypatch.setattr(page, "menu", lambda *_, **settings: None)
    monkeypatch.setattr(page.st, "dataframe", lambda frame, **settings: shown.append(frame))
    page.segments(reader)  # type: ignore[arg-type]
    assert [column for column in shown[0].columns if column.startswith("full ")] == [name]


def test_an_effect_of_rounding_is_not_missed() -> None:
    effects = {"effect": [1e-10, -1e-10, np.nan, 0.5, np.nan], "regret": [0.0, 0, 0, 0, 0.2]}
    triples = pd.DataFrame(effects).assign(unread=0.0, place=range(5), span=range(5))
    reader = SimpleNamespace(triples=lambda step: triples)
    assert missed(reader, 0)["span"].tolist() == [3, 4]  # type: ignore[arg-type]


def test_races_and_studies_take_segments(tmp_path: Path) -> None:
    text = f"Rules: be brief. {'The red key opens the old door. ' * 12}"
    shared: dict[str, Any] = {"model": "demo", "runs": tmp_path, "progress": False, "max_new": 2}
    lanes = kvlens.race(text, ["snapkv"], "40%", segments={"rules": (0, 17)}, **shared)
    assert all("rules" in set(run.segments()["segment"]) for run in lanes)
    rows = [{"id": "marked", "text": text}, {"id": "bare", "text": text[17:]}]
    with pytest.warns(UserWarning, match="segment_not_found"):
        study = kvlens.study(rows, ["snapkv"], ["40%"], segments={"rules": "Rules:"}, **shared)
    assert set(study.trials()["prompt"]) == {"marked"}
    for arm in study.trials()["arm"]:
        assert "rules" in set(study.run("marked", arm).segments()["segment"])
    more = [{"id": "other", "text": f"Rules: say all. {text}"}, {"id": "bare", "text": text[17:]}]
    with pytest.warns(UserWarning, match="segment_not_found"):
        study.extend(more, segments={"rules": "Rules: say"}, progress=False)
    assert set(study.trials()["prompt"]) == {"marked", "other"}
    assert "rules" in set(study.run("other", study.trials()["arm"][0]).segments()["segment"])
    with pytest.raises(kvlens.KvlensError) as refused:
        kvlens.study(rows[1:], ["snapkv"], segments={"rules": "Rules:"}, **shared)
    assert refused.value.code == "bad_segment"
    with pytest.raises(kvlens.KvlensError) as stray:
        kvlens.study(rows, ["snapkv"], chat_args={"enable_thinking": False}, **shared)
    assert stray.value.code == "template_failed"
