"""Presses of an installed kvpress as methods, with a package of its interface (tests/presses) in its place: what is
kept is what the press itself keeps of the stock model's cache."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import ListSink, random_llama, random_prompt, run
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlens import methods
from kvlens.cli.main import main
from kvlens.engine.engine import Engine, Options
from kvlens.engine.loop import Generation
from kvlens.engine.session import Session
from kvlens.methods.kvpress import NoPress, press_method
from kvlens.methods.pressrequirements import missing_requirements

N, TOKENS = 141, 37
RUNNABLE = "DrawnPress, NormPress, QueryPress, SharePress, WeightsPress, WholePress"


@pytest.fixture
def presses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """kvpress, imported by nobody yet."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "presses"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvpress"]:
        monkeypatch.delitem(sys.modules, name)
    press_method.cache_clear()
    yield
    press_method.cache_clear()
    sys.modules.pop("kvpress", None)


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """kvpress is not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "kvpress" else found(name, *more)
    )
    press_method.cache_clear()
    yield
    press_method.cache_clear()


def kept_by_the_press(model: Any, ids: tuple[int, ...], press: Any) -> list[list[list[int]]]:
    """Positions by layer and KV head: the stock model reads the prompt at once, and what a hook of kvpress would hand
    the press is handed to it."""
    own = copy.deepcopy(model.model)
    own.set_attn_implementation("eager")
    cache, given, found = DynamicCache(), {}, []
    for layer in own.model.layers:
        layer.self_attn.rotary_emb = own.model.rotary_emb
        hook = lambda module, args, kwargs, out: given.update({module.layer_idx: kwargs})  # noqa: E731
        layer.self_attn.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        own(torch.tensor([ids]), past_key_values=cache)
        for at, layer in enumerate(own.model.layers):
            told, held = given[at], cache.layers[at]
            places = press.compress(layer.self_attn, told["hidden_states"], held.keys, held.values, None, told)
            found.append(places[0].sort(-1).values.tolist())
    return found


def kept_here(model: Any, prompt: Any, name: str, **params: Any) -> list[list[list[int]]]:
    """The same of a session, its prompt read in chunks."""
    method, options = methods.get(name), Options(max_new=3, prefill_chunk=50)
    params = methods.make_parameters(method, None, {"tokens": TOKENS, **params})
    session = Session(method, params, Engine(model).context(prompt, None, options))
    with torch.inference_mode():
        Generation(model, prompt, session, options).place(None)
    slots = [session.memory.hot.slots(layer) for layer in range(model.shape.layers)]
    session.close()
    return [[sorted(head[head >= 0].tolist()) for head in layer.position] for layer in slots]


@pytest.mark.parametrize(
    ("name", "set_"),
    [
        ("NormPress", {}),
        ("NormPress", {"power": 1.0, "flipped": True}),
        ("QueryPress", {"window_size": 5}),
        ("SharePress", {}),
    ],
)
def test_what_stays_is_what_the_press_keeps(presses: Any, name: str, set_: dict[str, Any]) -> None:
    model, prompt = random_llama(), random_prompt(N + 1, seed=6)
    mine = kept_here(model, prompt, f"kvpress:{name}", **{key: str(value) for key, value in set_.items()})
    press = getattr(sys.modules["kvpress"], name)(compression_ratio=1 - (TOKENS + 0.5) / N, **set_)
    assert mine == kept_by_the_press(model, prompt.ids[:N], press)
    assert len(mine[0][0]) == TOKENS < N


def test_a_run_keeps_the_truths_and_leaves_the_model_as_it_was(presses: Any) -> None:
    model, prompt, sink = random_llama(), random_prompt(200), ListSink()
    before = {name: id(module) for name, module in model.model.named_modules()}
    functions = dict(ALL_ATTENTION_FUNCTIONS.items())
    settings: dict[str, Any] = {"budget": "30%", "max_new": 5, "keep_logits": True}
    recorded = run(model, prompt, "kvpress:DrawnPress", sink=sink, coverage=True, **settings)
    torch.rand(3)  # what others draw meanwhile changes nothing
    plain = run(model, prompt, "kvpress:DrawnPress", **settings)
    other = run(model, prompt, "kvpress:DrawnPress", seed=1, **settings)
    assert all(torch.equal(a, b) for a, b in zip(recorded.logits, plain.logits, strict=True))
    assert not torch.equal(plain.logits[0], other.logits[0])
    assert all(check.passed for check in recorded.checks), recorded.checks
    assert sink.prefilled.cuts
    assert before == {name: id(module) for name, module in model.model.named_modules()}
    assert not hasattr(model.model.model.layers[0].self_attn, "rotary_emb")
    assert functions == dict(ALL_ATTENTION_FUNCTIONS.items()), "kvpress wraps them when it is imported"
    whole = run(model, prompt, "kvpress:NormPress", max_new=5, keep_logits=True)
    full = run(model, prompt, "full", max_new=5, keep_logits=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.logits, full.logits, strict=True))


def test_attention_that_another_has_wrapped_is_the_same(presses: Any) -> None:
    """Whoever imports kvpress himself has every attention called with its dropout in the sixth place."""
    model, prompt = random_llama(), random_prompt(60)
    plain = run(model, prompt, "full", max_new=2, keep_logits=True)
    own = ALL_ATTENTION_FUNCTIONS["kvlens"]
    ALL_ATTENTION_FUNCTIONS["kvlens"] = lambda m, q, k, v, mask, dropout, **more: own(m, q, k, v, mask, dropout, **more)
    try:
        wrapped = run(model, prompt, "full", max_new=2, keep_logits=True)
    finally:
        ALL_ATTENTION_FUNCTIONS["kvlens"] = own
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, wrapped.logits, strict=True))


def test_its_parameters_are_the_presses_numbers_and_words(presses: Any) -> None:
    entry = methods.entry("kvpress:NormPress")
    names = {p["name"]: (p["type"], p["default"]) for p in entry["parameters"]}
    assert names["power"] == ("float", 2.0)
    assert names["flipped"] == ("bool", False)
    assert names["page"] == ("int", 16), "a name that both have is kvlens's"
    assert not {"weights", "compression_ratio"} & set(names)
    assert (entry["title"], entry["paper"]) == ("NormPress (kvpress)", "kvpress 0.0.test: Short keys stay")
    method = methods.get("kvpress:NormPress")
    assert "0.0.test" in repr(methods.make_parameters(method, None, {}))
    assert method is methods.get("kvpress:NormPress")
    for wrong, says in (
        ({"power": "0"}, r"^kvpress:NormPress: power must be above 0\.$"),
        ({"power": "x"}, r"^kvpress:NormPress: power takes a number, not 'x'\.$"),
        ({"weights": "1"}, r"^kvpress:NormPress has no parameter 'weights'; it has: [^\n]*\.$"),
    ):
        with pytest.raises(ValueError, match=says):
            methods.make_parameters(method, None, wrong)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Nope", f"kvpress has no press 'Nope'; those that kvlens can run: {RUNNABLE}."),
        ("ScorerPress", f"kvpress has no press 'ScorerPress'; those that kvlens can run: {RUNNABLE}."),
        ("MaskPress", "kvpress:MaskPress cannot be run: it is no scorer, which says a number per token; "),
        ("OwnCutPress", "kvpress:OwnCutPress cannot be run: it cuts in a way of its own, not by its scores alone; "),
        (
            "PreparedPress",
            "kvpress:PreparedPress cannot be run: it prepares itself from a model, for which it may ask ",
        ),
        ("AroundPress", "kvpress:AroundPress cannot be run: it needs press, for which there is no usual value; "),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(presses: Any, name: str, says: str) -> None:
    with pytest.raises(NoPress) as refused:
        methods.get(f"kvpress:{name}")
    assert str(refused.value).startswith(says)
    assert len(str(refused.value).splitlines()) == 1


def test_a_score_that_cannot_be_had_ends_the_run_with_one_sentence(presses: Any) -> None:
    model, prompt = random_llama(), random_prompt(100)
    for name, says in (("WeightsPress", "(set attn_implementation to eager)."), ("WholePress", "KV head and token.")):
        with pytest.raises(NoPress) as refused:
            run(model, prompt, f"kvpress:{name}", budget="30%", max_new=2)
        assert str(refused.value).startswith(f"kvpress:{name} ")
        assert str(refused.value).endswith(says)
        assert "\n" not in str(refused.value)


def test_without_kvpress_the_command_says_how_to_have_it(
    nothing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("The code of Ann is 4821. " * 30)
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sys, "argv", ["kvlens", "run", str(tmp_path / "p.txt"), "--method", "kvpress:KnormPress"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 1
    assert "pip install --no-deps kvpress`" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_what_kvpress_lacks_is_named(presses: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvpress").mkdir()
    for line, says in (
        ("import cachetools_that_is_not_there", "'cachetools_that_is_not_there'"),
        (
            "raise ImportError('cannot import name X')",
            "cannot be imported beside this transformers: cannot import name X.",
        ),
    ):
        (tmp_path / "kvpress" / "__init__.py").write_text(line)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        with pytest.raises(NoPress, match=says):
            methods.get("kvpress:NormPress")


def test_the_list_of_methods_says_that_there_are_presses(
    presses: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, expected in (
        (["methods"], "--method kvpress:NAME"),
        (["methods", "kvpress:NormPress"], "Short keys"),
    ):
        monkeypatch.setattr(sys, "argv", ["kvlens", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert expected in capsys.readouterr().out


def test_all_that_kvpress_lacks_is_named_at_once(presses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["first<2,>=1", "torch>=2", "transformers<5.3", "second", "third; extra == 'eval'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=ModuleNotFoundError(name="first")))
    assert missing_requirements() == ["first<2,>=1", "second"]
    with pytest.raises(NoPress) as refusal:
        press_method("kvpress:NormPress")
    assert "`pip install 'first<2,>=1' second`" in str(refusal.value)


def test_one_command_installs_kvpress_and_what_it_lacks(nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlens.methods.pressrequirements.REQUIRED", ("torch", "nosuchpackage"))
    with pytest.raises(NoPress) as refusal:
        press_method("kvpress:NormPress")
    assert "`pip install nosuchpackage && pip install --no-deps kvpress`" in str(refusal.value)
