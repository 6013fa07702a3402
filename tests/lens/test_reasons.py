"""Why a span was not there: on real runs of every method, against facts that are found another way."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from store_support import KeepingReader

from kvlens.demo.encode import demo_encode
from kvlens.demo.tasks import make_prompt
from kvlens.lens import reasons
from kvlens.lens.attribution import attribute, lost_steps, with_reasons
from kvlens.lens.place import Ranking
from kvlens.lens.reasonkinds import KINDS, Reason
from kvlens.lens.reasons import explain
from kvlens.lens.verdict import verdict
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText

pytestmark = pytest.mark.usefixtures("loaded_once")

#: method -> (task, budget, parameters) under which it loses an answer of the demo model
LOSING = {
    "streaming_llm": ("multikey", "10%", {}),
    "sekv": ("multikey", "20%", {}),
    "chess": ("multikey", None, {"keep": "0.1"}),
    "freekv": ("multikey", "20%", {"tau": "0"}),
    "sentkv": ("multikey", "15%", {}),
    "compresskv": ("list", "14%", {}),
    "snapkv": ("list", "14%", {}),
    "h2o": ("multikey", "10%", {}),
    "quest": ("multikey", None, {"keep": "0.05", "dense_layers": "0"}),
    "sparq": ("multikey", None, {"tokens": "8", "local": "4", "components": "4", "mean_value": "true"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reasons")


@pytest.fixture(scope="module")
def lost(folder: Path, loaded_once: None) -> dict[str, str]:
    """uid of a forced run per method, on the first of some prompts that it loses."""
    found: dict[str, str] = {}
    for method, (task, budget, overrides) in LOSING.items():
        for seed in range(9_100_001, 9_100_009):
            made = make_prompt(task, 1024, 0.3, seed, demo_encode())
            source = PromptText(made.text, made.answer, made.needle, task, seed)
            request = RunRequest(method=method, budget=budget, overrides=overrides, forced_reference=True, max_new=24)
            uid, _, _ = carry_out(request, source, folder, lambda *_: None, lambda: False)
            with KeepingReader.open(folder, uid) as reader:
                if lost_steps(reader.loss()):
                    found[method] = uid
                    break
    return found


@pytest.mark.parametrize("method", LOSING)
def test_the_worst_triples_have_a_reason_that_the_trace_bears_out(
    method: str, lost: dict[str, str], folder: Path
) -> None:
    with KeepingReader.open(folder, lost[method]) as reader:
        step = lost_steps(reader.loss())[0]
        named = with_reasons(reader, attribute(reader), step, 6)
        assert len(named) == 6
        assert set(named["reason"]) <= set(KINDS) - {"unknown", "held"}
        assert named["effect"].dropna().is_monotonic_decreasing
        for row in named.to_dict("records"):
            check(
                reader,
                step,
                int(row["layer"]),
                int(row["kv_head"]),
                int(row["span"]),
                str(row["reason"]),
                str(row["why"]),
            )
        worst = verdict(reader)
        assert worst is not None
        assert worst.missed is not None
        assert (worst.missed.layer, worst.missed.kv_head, worst.missed.span) == tuple(
            named.loc[0, ["layer", "kv_head", "span"]]
        )
        assert worst.missed.reason.says == named.loc[0, "why"]


def check(reader: TraceReader, step: int, layer: int, kv_head: int, span: int, kind: str, says: str) -> None:
    """The recorded rows the reason speaks of, asked directly."""
    states = reader.span_states(step, layer, kv_head).set_index("span")["state"]
    events = reader.events(layer=layer, kv_head=kv_head)
    events = events[events["span"] == span]
    scores = reader.scores(step, layer, kv_head).set_index("span")
    if kind == "evicted":
        assert states[span] == "evicted"
        assert (events["kind"] == "evict").any()
    elif kind == "refused":
        assert ((events["kind"] == "refused") & (events["step"] == step)).any()
    elif kind in ("below_the_cut", "passed_over") and span in scores.index:
        assert not scores.loc[span, "chosen"]
        assert f"rank {scores.loc[span, 'rank']} " in says
    elif kind == "not_corrected":
        assert float(reader.kv_cube("similarity")[step, layer, kv_head]) >= float(reader.meta.config["tau"])
    elif kind == "coarse_only":
        assert states[span] == "coarse"
    elif kind == "partly_evicted":
        rows, row = reader.cuts(step, layer, kv_head, span), reader.spans().set_index("span").loc[span]
        gone, tokens = int(rows["dropped"].sum()), int(row["tok_end"] - row["tok_start"])
        assert 0 < gone < tokens
        assert f"{gone} of its {tokens} tokens" in says
        if "kept_tokens" in reader.journal_names():
            kept = reader.journal("kept_tokens")
            of_layer = np.asarray(kept.loc[kept["layer"] == layer, "values"].iloc[0])
            assert int((of_layer[int(row["tok_start"]) : int(row["tok_end"])] == 0).sum()) == gone
    elif kind == "attended":
        assert states[span] == "resident"


def test_each_method_is_seen_to_lose_in_its_own_way(lost: dict[str, str], folder: Path) -> None:
    found = {}
    for method, uid in lost.items():
        with KeepingReader.open(folder, uid) as reader:
            step = lost_steps(reader.loss())[0]
            found[method] = set(with_reasons(reader, attribute(reader), step, 6)["reason"])
    assert found["streaming_llm"] == {"evicted"}
    assert found["chess"] == {"below_the_cut"}
    assert found["compresskv"] <= {"partly_evicted", "evicted"}
    assert "not_corrected" in found["freekv"]
    assert found["sekv"] & {"refused", "coarse_only"}
    assert "below_the_cut" in found["sentkv"]


def test_what_had_most_effect_comes_first_and_what_had_none_by_its_regret(lost: dict[str, str], folder: Path) -> None:
    with TraceReader.open(folder, lost["streaming_llm"]) as reader:
        (step,) = set(lost_steps(reader.loss())[:1])
        found, triples, effects = attribute(reader), reader.triples(step), reader.effects(step)
        assert len(effects) > 5
        assert reader.meta.no_effects is None
        named = ["layer", "kv_head", "span"]
        at_hand = effects.merge(triples[(triples["regret"] > 0) | (triples["unread"] > 0)][named])
        assert found[named].head(len(effects)).to_numpy().tolist() == effects[named].to_numpy().tolist()
        assert tuple(map(tuple, effects[named].to_numpy().tolist())) == reader.meta.effect_order
        rest = found.iloc[len(effects) :]
        assert len(rest) > 5
        assert rest["effect"].isna().all()
        assert rest["regret"].is_monotonic_decreasing
        first = verdict(reader)
        assert first is not None
        assert first.missed is not None
        assert (first.missed.layer, first.missed.kv_head, first.missed.span) == tuple(at_hand[named].iloc[0])
        assert first.missed.effect == at_hand["effect"].iloc[0]
        assert first.missed.effect_steps == reader.meta.effect_steps


def test_a_span_that_was_attended_is_said_to_have_been(lost: dict[str, str], folder: Path) -> None:
    with TraceReader.open(folder, lost["streaming_llm"]) as reader:
        step = lost_steps(reader.loss())[0]
        sink = int(reader.spans().query("kind == 'sink'")["span"].iloc[0])
        assert explain(reader, step, 0, 0, sink).kind == "attended"


@pytest.mark.parametrize(
    ("method", "overrides", "kinds"),
    [
        (
            "arkvale",
            {},
            {"below_the_cut", "passed_over"},
        ),  # recalls the best page, the other places keep what they have
        ("freekv", {"tau": "1"}, {"below_the_cut"}),  # the best pages
    ],
)
def test_a_span_that_scored_above_chosen_ones_was_not_left_out_for_its_score(
    method: str, overrides: dict[str, str], kinds: set[str], tmp_path: Path
) -> None:
    made = make_prompt("multikey", 1024, 0.3, 9_100_001, demo_encode())
    source = PromptText(made.text, made.answer, made.needle, "multikey", 1)
    request = RunRequest(method=method, budget="20%", overrides=overrides, max_new=2)
    uid, _, _ = carry_out(request, source, tmp_path, lambda *_: None, lambda: False)
    found = set()
    with KeepingReader.open(tmp_path, uid) as reader:
        for row in reader.triples(0).head(60).to_dict("records"):
            at = 0, int(row["layer"]), int(row["kv_head"])
            scores, span = reader.scores(*at), int(row["span"])
            said = explain(reader, *at, span)
            mine = scores.loc[scores["span"] == span, "score"].max()  # NaN: not among those that were recorded
            over = int((scores["chosen"] & (scores["score"] < mine)).sum())
            assert said.kind == ("passed_over" if over else "below_the_cut"), said
            assert (f" {over} of those " in said.says) == (over > 0)
            found.add(said.kind)
    assert found == kinds


def test_equal_scores_are_in_order() -> None:
    """The earlier of two that score alike is chosen: nothing but the score decided."""
    frame = pd.DataFrame({"span": [4, 5, 6, 7], "score": [9.0, 7.0, 7.0, 3.0], "rank": [1, 2, 3, 4]})
    told = {}
    for chosen in ((4, 5), (4, 7), (4, 5, 7)):
        table = frame.assign(chosen=frame["span"].isin(chosen))
        table.attrs["candidates"] = 4
        reader: Any = SimpleNamespace(scores=lambda step, layer, kv_head, table=table: table)
        told[chosen] = [Ranking.read(reader, 0, 0, 0, span).passed_over for span in (4, 5, 6, 7, 8)]
    assert told == {
        (4, 5): [False, False, False, False, False],
        (4, 7): [False, True, True, False, False],
        (4, 5, 7): [False, False, True, False, False],
    }
    said = Ranking(52, 32, 3, 2, 37.03, False, 2).cut()
    assert re.findall(r"\d+", said)[-3:] == ["3", "32", "2"], "chosen, of the best, those that scored less"


@pytest.mark.parametrize(
    ("kind", "the_methods"),
    [
        ("evicted", True),
        ("below_the_cut", True),
        ("passed_over", True),
        ("refused", True),
        ("coarse_only", True),
        ("averaged", True),
        ("partly_attended", False),
        ("some_heads", False),
        ("attended", False),
        ("unknown", False),
    ],
)
def test_what_a_drop_alone_brings_about_is_not_put_down_to_the_method(
    kind: str, the_methods: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasons, "_of_the_method", lambda facts: Reason(kind, "so it was"))
    facts = cast(Any, SimpleNamespace(held=False, tokens=(8, 16), dropped_tokens=((8, 12),)))
    beside = "; apart from that: so it was" if the_methods else ""
    assert reasons.reason(facts) == Reason("dropped", f"the what-if dropped tokens 8-11 of it{beside}")
