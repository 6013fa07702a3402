"""The reference of a run: made once, found again, made again where it is damaged, never taken for another model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import raises_code, task_prompt
from typer.testing import CliRunner

from kvlens.cli.main import app
from kvlens.engine.engine import Engine
from kvlens.metaparts import Sampled
from kvlens.runs.carrying import carry_out
from kvlens.runs.preparing import Prepared, reference_key
from kvlens.runs.reference import LOGITS_FILE, find, load, obtain
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader, list_runs

REQUEST = RunRequest(method="streaming_llm", max_new=8, against=True)


def quiet(phase: str, done: int, total: int) -> None:
    """Nobody looks."""


@pytest.fixture(scope="module")
def source(demo: Any) -> Any:
    return task_prompt(demo, "needle", 500, max_new=8)[0].source


@pytest.fixture(scope="module")
def prepared(demo: Any) -> Prepared:
    prompt, _ = task_prompt(demo, "needle", 500, max_new=8)
    return Prepared(Engine(demo), prompt, demo.fingerprint())


def test_a_run_against_full_stores_both_and_the_next_finds_the_reference(source: Any, tmp_path: Path) -> None:
    phases: list[str] = []
    first = carry_out(REQUEST, source, tmp_path, lambda phase, *_: phases.append(phase), lambda: False)[0]
    assert "reference" in phases
    phases.clear()
    forced = REQUEST.model_copy(update={"forced_reference": True})
    second = carry_out(forced, source, tmp_path, lambda phase, *_: phases.append(phase), lambda: False)[0]
    assert "reference" not in phases
    runs = list_runs(tmp_path).set_index("uid")
    assert len(runs) == 3
    reference = runs.loc[first, "reference"]
    assert reference == runs.loc[second, "reference"]
    assert runs.loc[reference, "method"] == "full"
    assert pd.isna(runs.loc[reference, "reference"])
    assert len(set(runs["reference_key"])) == 1
    assert dict(runs["forced"]) == {reference: False, first: False, second: True}
    assert not runs["hold"].any()
    with TraceReader.open(tmp_path, second) as reader:
        assert reader.meta.reference == reference
        assert reader.meta.forced is True
        assert (reader.meta.parent, reader.meta.hold, reader.meta.whatif) == (None, (), None)
        said = reader.meta.reference_output
        table = reader.loss()
        assert len(table) == reader.n_steps
        assert (table["kl"] >= 0).all()
    with TraceReader.open(tmp_path, first) as reader:
        assert reader.meta.reference_output == said
    with TraceReader.open(tmp_path, reference) as reader:
        assert said
        assert (reader.meta.output_text, reader.meta.reference_output) == (said, None)
        tokens = reader.tokens()
        assert tokens[tokens["step"].notna()].sort_values("step")["token_id"].tolist() == table["ref_token"].tolist()


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("streaming_llm", {"budget": "2tok"}, "budget_infeasible"),
        ("sekv", {"budget": "2tok"}, "budget_infeasible"),
        ("sekv", {"budget": "60tok", "preset": "demo"}, "budget_infeasible"),
        ("sentkv", {"budget": "0.9", "overrides": {"usage": 0.001}}, "raise usage"),
        ("full", {"budget": "2tok"}, "budget_infeasible"),
    ],
)
@pytest.mark.parametrize("forced", [False, True])
def test_a_run_that_is_refused_leaves_no_reference_behind(
    source: Any, tmp_path: Path, method: str, change: dict[str, Any], said: str, forced: bool
) -> None:
    request = REQUEST.model_copy(update={"method": method, "forced_reference": forced, **change})
    phases: list[str] = []
    with pytest.raises(ValueError, match=said):
        carry_out(request, source, tmp_path, lambda phase, *_: phases.append(phase), lambda: False)
    assert list(tmp_path.iterdir()) == []
    assert "reference" not in phases, "and nobody waited for it"
    assert ("check" in phases) is (change["budget"] in ("60tok", "0.9")), (
        "the prompt is read only where arithmetic does not know enough"
    )


def test_a_reference_is_recorded_as_the_run_that_asks_for_it(source: Any, tmp_path: Path) -> None:
    for oracle, recorded in (("every=2,layers=1-2", {"every": 2, "layers": [1, 2]}), ("off", None)):
        request = REQUEST.model_copy(update={"oracle": oracle, "max_new": 4})
        uid = carry_out(request, source, tmp_path / oracle, quiet, lambda: False)[0]
        with TraceReader.open(tmp_path / oracle, uid) as reader:
            asking, reference = reader.meta.oracle, reader.meta.reference
        with TraceReader.open(tmp_path / oracle, reference) as reader:
            assert reader.meta.oracle == asking == (recorded and Sampled.model_validate(recorded))
            assert ("regret" in reader.metrics()) is (recorded is not None)
            if recorded is not None:
                regret = reader.head_cube("regret")
                assert float(np.nanmax(regret)) == 0.0, "full KV misses nothing: measured, not assumed"
                assert not np.isnan(regret[::2, 1:3]).any()


def test_the_options_of_kvlens_run(source: Any, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(source.text, encoding="utf-8")
    command = ["run", str(prompt), "--method", "streaming_llm", "--max-new", "4", "--runs", str(tmp_path / "runs")]
    metas = []
    for more in (["--against-full", "--oracle", "every=2,layers=1-2"], ["--forced"], ["--no-coverage"]):
        done = CliRunner().invoke(app, [*command, *more])
        assert done.exit_code == 0, done.output
        with TraceReader.open(tmp_path / "runs", done.stdout.splitlines()[-1]) as reader:
            metas.append(reader.meta)
            assert reader.loss().empty is ("--no-coverage" in more)
    assert [meta.forced for meta in metas] == [False, True, False]
    assert [meta.oracle for meta in metas] == [
        Sampled(every=2, layers=(1, 2)),
        Sampled(every=1, layers=tuple(range(6))),
        None,
    ]
    assert metas[0].reference == metas[1].reference is not None
    assert metas[2].reference is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"oracle": "now and then"}, "does not say which full attention"),
        ({"forced": (1, 2)}, "fed given tokens or compared"),
        ({"hold": ({"span": 1, "tok_start": 5, "tok_end": 5, "heads": ()},)}, "no tokens to hold"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_before_a_model_is_loaded(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunRequest(**{**REQUEST.model_dump(), **change})


def test_a_request_survives_json() -> None:
    from kvlens.holds import Hold

    request = REQUEST.model_copy(update={"hold": (Hold(3, 10, 20, ((0, 1), (2, 0)), 4),), "oracle": "off"})
    assert RunRequest.model_validate_json(request.model_dump_json()) == request


def test_damaged_or_missing_logits_are_computed_again_for_the_same_run(prepared: Prepared, tmp_path: Path) -> None:
    whole = obtain(prepared, REQUEST, tmp_path, quiet)
    file = tmp_path / whole.uid / LOGITS_FILE
    good = file.read_bytes()

    def flipped() -> bytes:
        data = bytearray(good)
        data[-100] ^= 1
        return bytes(data)

    for damage in (good[: len(good) // 2], b"", flipped(), None):
        file.unlink()
        if damage is not None:
            file.write_bytes(damage)
        again = obtain(prepared, REQUEST, tmp_path, quiet)
        assert again.uid == whole.uid
        assert again.ids == whole.ids
        assert torch.equal(again.logits, whole.logits)
        assert load(tmp_path, whole.uid, reference_key(REQUEST, prepared)) is not None
    assert len(list_runs(tmp_path)) == 1
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".logits")] == []


def test_a_run_of_full_kv_becomes_the_reference(source: Any, prepared: Prepared, tmp_path: Path) -> None:
    plain = carry_out(RunRequest(method="full", max_new=8), source, tmp_path, quiet, lambda: False)[0]
    assert obtain(prepared, REQUEST, tmp_path, quiet).uid == plain
    assert len(list_runs(tmp_path)) == 1


def test_a_reference_whose_trace_is_gone_is_made_anew(prepared: Prepared, tmp_path: Path) -> None:
    first = obtain(prepared, REQUEST, tmp_path, quiet)
    (tmp_path / first.uid / LOGITS_FILE).unlink()
    (tmp_path / first.uid / "trace.duckdb").unlink()
    second = obtain(prepared, REQUEST, tmp_path, quiet)
    assert second.uid != first.uid
    assert torch.equal(first.logits, second.logits)


def test_what_makes_another_reference(prepared: Prepared, demo: Any, tmp_path: Path) -> None:
    key = reference_key(REQUEST, prepared)
    others = [
        {"max_new": 9},
        {"seed": 1},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"stop": ("a",)},
        {"ignore_eos": True},
        {"dtype": "bfloat16"},
    ]
    keys = {reference_key(REQUEST.model_copy(update=change), prepared) for change in others}
    other_prompt = Prepared(
        prepared.engine, task_prompt(demo, "needle", 500, seed=1, max_new=8)[0], prepared.fingerprint
    )
    keys |= {
        reference_key(REQUEST, other_prompt),
        reference_key(REQUEST, Prepared(prepared.engine, prepared.prompt, "other weights")),
    }
    assert len(keys | {key}) == len(others) + 3
    same = REQUEST.model_copy(
        update={"method": "sekv", "budget": "0.5", "coverage": False, "top_k": 3, "trace_level": "heads"}
    )
    assert reference_key(same, prepared) == key, "the method, its budget and what is logged do not change full KV"
    made = obtain(prepared, REQUEST, tmp_path, quiet)
    assert find(tmp_path, key) == made.uid
    assert load(tmp_path, made.uid, keys.pop()) is None, "a file of another key is not taken"


def test_a_fingerprint_notices_other_weights(demo: Any, tmp_path: Path) -> None:
    import shutil

    from kvlens.demo import demo_path
    from kvlens.engine.models import LoadedModel

    folder = tmp_path / "model"
    shutil.copytree(demo_path(), folder)
    copy = LoadedModel(**{**demo.__dict__, "name": str(folder)})
    assert copy.fingerprint() == demo.fingerprint()
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert copy.fingerprint() != demo.fingerprint()


def test_too_many_logits_are_refused_before_anything_runs(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lower --max-new"):
        obtain(prepared, REQUEST.model_copy(update={"max_new": 10**7}), tmp_path, quiet)
    assert list_runs(tmp_path).empty


def test_cancelling_while_the_reference_is_made_says_so(prepared: Prepared, tmp_path: Path) -> None:
    calls = iter(range(10**6))
    with raises_code("cancelled"):
        obtain(prepared, REQUEST, tmp_path, quiet, lambda: next(calls) > 3)
    assert list(list_runs(tmp_path)["status"]) == ["cancelled"]
    assert obtain(prepared, REQUEST, tmp_path, quiet).ids, "the cancelled one is not taken for a reference"


def test_cancelling_while_the_budget_is_checked_leaves_nothing(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was stored"):
        obtain(prepared, REQUEST.model_copy(update={"method": "sekv", "budget": "0.5"}), tmp_path, quiet, lambda: True)
    assert list(tmp_path.iterdir()) == []
