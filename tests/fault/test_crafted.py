"""Crafted traces and models: a trace that fails its check is opened nowhere and named, and ends no list of the others.
`benchmarks/damage.py` and `benchmarks/damagemodels.py` try all kinds; here is one of each sort."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import craftedmodels
import pytest
from crafted import Kind, damage, state_kinds, table_kinds
from store_support import one_sentence

from kvlens.engine.models import load
from kvlens.lens.diagnosis import Wanted, diagnose
from kvlens.lens.listing import Search
from kvlens.lens.runlist import search_runs
from kvlens.models.errors import UnsupportedModel
from kvlens.store.errors import UnreadableRun
from kvlens.store.reader import TraceReader
from kvlens.text.promptfiles import read_prompt
from kvlens.text.prompts import BadPrompt
from tests.synthetic import write_synthetic

GOOD, BAD = "20260101-000000-good", "20260102-000000-bad"
LIMIT_S = 240


def first_of_each(given: list[Kind]) -> list[Kind]:
    """Return the first kind of each group and expectation."""
    return list({(kind.group, kind.sound): kind for kind in reversed(given)}.values())


KINDS = [kind for kind in [*first_of_each(list(table_kinds())), *state_kinds()] if kind.sound is not None]
MODELS = [
    kind
    for kind in craftedmodels.kinds()
    if kind.group in ("pipe", "device", "holes", "weights", "GGUF", "GGUF holes")
    or kind.name in ("config num_hidden_layers: a million", "config.json: nested without end")
    or kind.name.startswith(
        ("config eos_token_id: an", "config sliding_window: NaN", "config intermediate_size: a mill")
    )
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_synthetic(folder, 2, 4, 2, 4, 8, uid=GOOD, prompt_tokens=120, answer="4172")
    write_synthetic(folder, 2, 4, 2, 4, 8, uid=BAD, prompt_tokens=120, answer="4172", seed=1)
    return folder


@pytest.fixture
def in_time() -> Iterator[None]:
    """A test that hangs fails."""
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_a_damaged_trace_is_opened_nowhere_and_others_are_read(base: Path, tmp_path: Path, kind: Kind) -> None:
    runs = Path(shutil.copytree(base, tmp_path / "runs"))
    assert damage(runs / BAD / "trace.duckdb", kind)
    if kind.sound:
        with TraceReader.open(runs, BAD) as reader:
            assert reader.n_steps == 4
        return
    with pytest.raises(UnreadableRun) as caught:
        TraceReader.open(runs, BAD)
    one_sentence(caught.value)
    problems = search_runs(runs, Search()).set_index("uid")["problem"]
    assert problems.isna()[GOOD]
    assert problems[BAD] == caught.value.code
    diagnosis = diagnose(runs, Wanted())
    assert (diagnosis.compared, len(diagnosis.unread)) == (1, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    craftedmodels.write_whole(folder)
    return folder


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("kind", MODELS, ids=[kind.name for kind in MODELS])
def test_a_crafted_model_is_refused(model: Path, tmp_path: Path, kind: craftedmodels.ModelKind) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    kind.change(folder)
    with pytest.raises(UnsupportedModel):
        load(str(folder / "model.gguf" if kind.gguf else folder))


@pytest.mark.usefixtures("in_time")
def test_a_prompt_of_holes_is_not_read(tmp_path: Path) -> None:
    craftedmodels.put_holes("p.txt")(tmp_path)
    with pytest.raises(BadPrompt, match="too_large"):
        read_prompt(tmp_path / "p.txt")
