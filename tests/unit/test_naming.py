"""What a method is called: parts that nothing was trained or calibrated for are named with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest

from kvlens import methods
from kvlens.lab.results.names import table_name
from kvlens.lens.listing import Search
from kvlens.lens.runlist import search_runs
from kvlens.meta import RunMeta
from kvlens.methods import naming
from kvlens.methods.full import FullKV
from kvlens.methods.parameters import param
from kvlens.runs.request import default_preset
from tests.synthetic import write_synthetic

BOTH = {"heads": "all", "layers": "equal"}
SIZES = {"layers": 1, "q_heads": 1, "kv_heads": 1}


@pytest.mark.parametrize(
    ("method", "preset", "overrides", "name"),
    [
        ("sekv", "paper", {}, "SeKV (untrained router)"),
        ("sekv", "fit", {"window": 8}, "SeKV (untrained router)"),
        ("sekv", "demo", {}, "SeKV"),
        ("sekv", "no-coarse", {}, "SeKV"),
        ("sekv", "no-coarse", {"router": "pca"}, "SeKV (untrained router)"),
        ("duoattention", "paper", {"gates": "none"}, "DuoAttention (untrained gates)"),
        ("compresskv", None, BOTH, "CompressKV (uncalibrated heads, uncalibrated layers)"),
        ("compresskv", "paper", {"layers": "equal"}, "CompressKV (uncalibrated layers)"),
        ("headkv", "paper", {}, "HeadKV"),
        ("full", None, {}, "FullKV"),
        ("not installed", "paper", {}, "not installed"),
    ],
)  # fmt: skip
def test_a_method_is_called_by_its_title_and_its_stand_ins(
    method: str, preset: str | None, overrides: dict[str, str], name: str
) -> None:
    assert naming.preset_name(method, preset, overrides) == name


def test_fit_takes_the_trained_parts_of_the_models_own_preset() -> None:
    assert naming.preset_name("sekv", "smollm2") == "SeKV"
    assert naming.preset_name("sekv", "fit", {}, default_preset("sekv", "smollm2")) == "SeKV"
    assert naming.preset_name("sekv", "fit", {"router": "pca"}, "smollm2") == "SeKV (untrained router)"
    assert naming.preset_name("sekv", "fit", {}, default_preset("sekv", "another")) == "SeKV (untrained router)"


def test_every_method_that_can_run_untrained_is_named_so() -> None:
    able = {name: method for name, method in methods.registry().items() if method.untrained}
    needing = {"sekv", "chess", "compresskv", "duoattention", "headkv", "loki", "qfilters", "razorattention", "seer"}
    assert set(able) == needing
    for name, method in able.items():
        config = dataclasses.asdict(methods.make_parameters(method, None, method.untrained))
        words = naming.stand_in(name, config)
        assert words.count(",") + 1 == len(method.untrained)
        assert naming.display_name(name, config) == f"{method.title} ({words})"
        assert set(method.stand_ins) <= set(method.untrained)


@dataclasses.dataclass(frozen=True)
class Weighed:
    weights: str = param("learned", "whose weights", choices=("learned", "flat"))


class Plugin(FullKV):
    name, title, Parameters = "plugin_of_a_test", "Plugin", Weighed
    untrained: ClassVar[dict[str, str]] = {"weights": "flat"}


def test_a_method_of_a_user_needs_no_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_registered", {})
    methods.register(Plugin)
    try:
        assert naming.preset_name(Plugin.name, None, {"weights": "flat"}) == "Plugin (uncalibrated weights)"
        assert naming.preset_name(Plugin.name, None) == "Plugin"
    finally:
        methods.registry.cache_clear()


def test_a_run_of_a_method_that_is_not_installed_has_what_it_recorded() -> None:
    meta = RunMeta(**SIZES, method="gone", stand_in="untrained gates", config={})
    assert naming.run_name(meta) == "gone (untrained gates)"
    old = RunMeta(**SIZES, method="sekv", config={"router": "pca"})
    assert (naming.run_name(old), naming.code_name(old)) == ("SeKV (untrained router)", "sekv (untrained router)")


def test_tables_name_what_their_presets_ran() -> None:
    assert table_name("sekv", ["fit", "paper"]) == "SeKV (untrained router)"
    assert table_name("sekv", ["fit", "no-coarse"]) == "SeKV (untrained router) or SeKV"
    assert table_name("sekv", ["fit"], "smollm2") == "SeKV"
    assert table_name("sekv", ["fit"], "paper") == "SeKV (untrained router)"
    assert table_name("snapkv", ["defaults", None]) == "SnapKV"
    assert table_name("sekv", []) == "SeKV"


def test_a_list_of_runs_records_the_stand_in(tmp_path: Path) -> None:
    write_synthetic(tmp_path, 1, 1, 1, 4, 8, method="sekv", config={"router": "pca"}, stand_in="untrained router")
    write_synthetic(tmp_path, 1, 1, 1, 4, 8, seed=1, method="sekv", config={"router": "trained"})
    listed = search_runs(tmp_path, Search())
    assert sorted(listed["stand_in"].fillna("")) == ["", "untrained router"]
