"""What the GPU bench makes of tokens, bytes and recording of the engine on two devices: what passes does so within its
own tolerance, and what a tie explains is not compared."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from support import SAVES_LITTLE

from kvlens import methods
from kvlens.budget import Budget
from kvlens.engine.engine import Engine
from kvlens.engine.models import load
from kvlens.engine.options import Result
from kvlens.lab.gpu import tier
from kvlens.lab.gpu.tier import Ground, Sink, Way, token_row
from kvlens.lab.gpu.verdicts import Verdict

# tokens


def result(ids: list[int], *logits: list[float]) -> Result:
    made = Result(ids, "", torch.zeros(1), [], "", 0.0, 0.0, [], 0, [])
    made.logits = [torch.tensor(row) for row in logits]
    return made


CLOSE, WIDE = [5.0, 4.99999, 0.0], [5.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("ours", "logits", "verdict", "passes", "said"),
    [
        ([0, 0], WIDE, Verdict("equal"), True, "share of tokens that differ"),
        ([0, 1], WIDE, Verdict("equal"), False, "first at step 1, logits 0.8 of the largest apart"),
        ([0, 1], CLOSE, Verdict("equal"), True, "first at step 1, logits 2e-06 of the largest apart, a tie"),
        ([0, 1], WIDE, Verdict("x", 1e-6, 1), None, "behind a tie of choices"),
        ([0, 0], WIDE, Verdict("x", 1e-6, 1), True, "share of tokens that differ"),
        ([1, 0], WIDE, Verdict("x", 1e-6, 1), False, "first at step 0, logits 0.8 of the largest apart"),
        ([0, 1], WIDE, Verdict("x", 0.5, 1), False, "first at step 1, logits 0.8 of the largest apart"),
    ],
)
def test_tokens_that_differ(
    ours: list[int], logits: list[float], verdict: Verdict, passes: bool | None, said: str
) -> None:
    """None: they are not compared. What passes does so within its own tolerance."""
    row = token_row("m", result([0, 0], logits, logits), result(ours, logits, logits), verdict)
    assert row.passed is passes
    assert passes is None or (row.error <= row.tolerance) is passes
    assert row.name.endswith(said)


# recorded against not recorded, and bytes behind a tie


def test_one_bit_of_a_logit_is_a_difference() -> None:
    assert tier.unlike(result([1], [0.0, 1.0]), result([1], [0.0, 1.0])) == 0
    assert tier.unlike(result([1], [0.0, 1.0]), result([1], [-0.0, 1.0])) == 1
    assert tier.unlike(result([1, 2], [0.0], [0.0]), result([1, 1], [0.0], [0.0])) == 0.5


class Drifting(Way):
    """Every run comes to other logits; only a recorded one where it is steady otherwise."""

    def run(self, ground: Any, sink: Any, *more: Any) -> Result:
        self.overrides["runs"] += 1
        steady = self.overrides["steady"] and sink is None
        return result([1], [0.0 if steady else float(self.overrides["runs"])])


@pytest.mark.parametrize("steady", [True, False])
def test_what_recording_changes_is_a_failed_check(steady: bool) -> None:
    way = Drifting("m", {"runs": 0, "steady": steady}, 0.0, 1)
    rows = list(tier._recording("m", way, dict.fromkeys(tier.DTYPES, cast(Ground, None))))
    assert [row.passed for row in rows] == [False, False]
    assert [row.name.endswith("not deterministic on this device") for row in rows] == [not steady] * 2
    assert {row.name.split(", ")[1] for row in rows} == {"fp32", "bf16"}


@pytest.mark.parametrize(("verdict", "passes"), [(Verdict("equal"), False), (Verdict("x", 1e-6, 1), None)])
def test_bytes_are_compared_unless_a_tie_explains_them(verdict: Verdict, passes: bool | None) -> None:
    host, ours = Sink({"h2d": 100, "d2h": 0}), Sink({"h2d": 90, "d2h": 0})
    row = tier._bytes("m", Way("m", {}, 0.0, 1), host, ours, verdict)
    assert (row.passed, round(row.error, 6), row.tolerance) == (passes, 0.1, 0.0)


# two models that differ in rounding, and in more


def moved(ground: Ground, share: float) -> Ground:
    """The same with weights that are moved by a share of themselves, and the prompt read in other chunks."""
    loaded = copy.copy(ground.loaded)
    loaded.model = copy.deepcopy(ground.loaded.model)
    generator = torch.Generator().manual_seed(0)
    for weight in loaded.model.parameters():
        weight.data.mul_(1 + share * torch.randn(weight.shape, generator=generator))
    return Ground(loaded, ground.prompt, Engine(loaded).read(ground.prompt, 100, 128, True))


@pytest.fixture(scope="module")
def host() -> Ground:
    return Ground.build("cpu", "float32", 6)


@pytest.mark.parametrize(("share", "passes"), [(1e-6, True), (1e-3, False)])
def test_rounding_passes_and_another_model_does_not(host: Ground, share: float, passes: bool) -> None:
    device = moved(host, share)
    for name in ("snapkv", "tova", "infllm", "pqcache"):
        rows = list(tier._against_host(name, Way(name, {}, 0.0, 6), host, device))
        assert rows[0].passed is passes, rows[0].name
        assert not [row for row in rows if row.passed is False] or not passes


def test_every_way_is_equal_to_itself(host: Ground) -> None:
    for way in tier.ways(2):
        rows = list(tier._against_host(way.title, way, host, host))
        assert [row.passed for row in rows] == [True] * 4, [row.name for row in rows]
        assert " are equal" in rows[0].name
        assert "all 0 " not in rows[0].name, "nothing of it was noted"
        assert [row.error for row in rows] == [0.0] * 4


@pytest.mark.parametrize("dtype", tier.DTYPES)
def test_every_method_fits_the_share_that_the_bench_gives(dtype: str) -> None:
    shape = load("demo", "cpu", dtype).shape
    limit = Budget.parse(tier.SHARE).bytes(shape, tier.LENGTH + tier.NEW)
    assert limit is not None
    for way in tier.ways(tier.NEW):
        method = methods.get(way.name)
        params = methods.make_parameters(method, "demo" if "demo" in method.presets else None, way.overrides)
        if not method.keeps_all and way.name not in SAVES_LITTLE:
            assert method.floor_bytes(params, shape, tier.LENGTH - 1, tier.NEW) <= limit, way.title
