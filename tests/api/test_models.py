"""A loaded model object handed to the API: checked, used as it is, and named in what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from apirun import BUDGET, METHOD, NEW
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, LlamaModel

import kvlens
from kvlens.demo import demo_path
from kvlens.observing.preparing import describe_caller


@pytest.fixture(scope="module")
def toy() -> tuple[Any, Any]:
    """The toy as a user of transformers has it: gradients on, in training mode, its own attention."""
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    return model.train().requires_grad_(True), AutoTokenizer.from_pretrained(demo_path())


@pytest.fixture(scope="module")
def made(runs: Path, toy: tuple[Any, Any]) -> kvlens.Run:
    model, tokenizer = toy
    sample = kvlens.sample("demo")
    return kvlens.run(sample, METHOD, BUDGET, model=model, tokenizer=tokenizer, chat="off", max_new=NEW, progress=False)


def test_an_object_runs_as_its_files_do(made: kvlens.Run, lost: kvlens.Run) -> None:
    assert made.output == lost.output
    assert made.verdict == lost.verdict
    assert (made.reader.head_cube("entropy") == lost.reader.head_cube("entropy")).all()


def test_what_is_stored_says_that_it_was_an_object(made: kvlens.Run, lost: kvlens.Run) -> None:
    assert made.meta.model_info is not None
    assert lost.meta.model_info is not None
    assert (made.meta.model_info.origin, lost.meta.model_info.origin) == ("object", None)
    assert made.meta.model == str(demo_path())
    assert str(made.meta.model_fingerprint).startswith("sha256:")
    assert made.meta.model_fingerprint != lost.meta.model_fingerprint, "of its weights, not of files"
    assert (made.meta.device, made.meta.dtype) == ("cpu", "float32")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/cache/hub/models--org--toy-1.5/snapshots/0123abcd", "org/toy-1.5"),
        ("/cache/hub/models--toy/snapshots/0123abcd/", "toy"),
        ("C:\\hub\\models--org--toy\\snapshots\\0123abcd", "org/toy"),
        ("/models/toy", "/models/toy"),
        ("/hub/models--org--toy", "/hub/models--org--toy"),
        ("org/toy", "org/toy"),
    ],
)
def test_a_snapshot_of_the_hub_has_the_name_of_its_model(source: str, name: str, toy: tuple[Any, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    model.config._name_or_path = source
    assert kvlens.load_model(model, toy[1]).name == name
    assert describe_caller(model, toy[1], None)[0].name == name
    assert describe_caller(model, None, None)[0].name == name, "also where kvlens cannot run it"


def test_a_snapshot_that_transformers_loads_has_the_name_of_its_model(toy: tuple[Any, Any], tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--toy" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(demo_path(), target_is_directory=True)
    model = AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32)
    with kvlens.observe(model, toy[1], runs=tmp_path / "runs", compare=False, progress=False) as seen:
        ids = toy[1]("the word", return_tensors="pt").input_ids
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert seen.run.meta.model == "org/toy"


def test_the_object_is_left_as_it_was(made: kvlens.Run, toy: tuple[Any, Any]) -> None:
    model, tokenizer = toy
    assert made.status == "completed"
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    ids = tokenizer("the word", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] == ids.shape[1] + 2


def test_repeats_use_the_same_object(made: kvlens.Run, toy: tuple[Any, Any]) -> None:
    verdict = made.verdict
    held = made.hold(span=verdict.span, layer=verdict.layer, kv_head=verdict.kv_head, progress=False)
    assert held.restored is True
    assert held.meta.model_fingerprint == made.meta.model_fingerprint
    assert toy[0].training


def test_opened_without_the_object_it_is_read_and_not_repeated(made: kvlens.Run, toy: tuple[Any, Any]) -> None:
    opened = kvlens.open(made.uid)
    assert opened.verdict == made.verdict
    with pytest.raises(kvlens.RunError) as error:
        opened.hold(span=opened.verdict.span, progress=False)
    assert error.value.code == "model_object_missing"
    again = kvlens.open(made.uid, model=toy[0], tokenizer=toy[1])
    assert again.at(budget="90%", progress=False).restored is True


def test_changed_weights_are_noticed(made: kvlens.Run, toy: tuple[Any, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(kvlens.RunError) as error:
        kvlens.open(made.uid, model=model, tokenizer=toy[1]).hold(span=1, progress=False)
    assert error.value.code == "cannot_repeat"


def test_a_loaded_model_can_be_given_a_name(toy: tuple[Any, Any]) -> None:
    named = kvlens.load_model(*toy, name="my-toy")
    assert (named.name, named.info["origin"]) == ("my-toy", "object")
    assert kvlens.load_model(named) is named
    by_name = kvlens.load_model("demo")
    assert "origin" not in by_name.info
    assert kvlens.load_model("demo") is by_name, "a model in use is not loaded again"


def small(kind: Any, config: Any) -> Any:
    return kind(config(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (lambda toy: small(Gemma2ForCausalLM, Gemma2Config), "unsupported_model"),
        (lambda toy: LlamaModel(toy[0].config), "unsupported_model"),
        (lambda toy: torch.nn.Linear(2, 2), "unsupported_model"),
        (lambda toy: 7, "unsupported_model"),
    ],
    ids=["family", "no head", "no transformer", "no model"],
)
def test_objects_that_cannot_run(toy: tuple[Any, Any], model: Any, code: str) -> None:
    with pytest.raises(kvlens.ModelError) as error:
        kvlens.load_model(model(toy), toy[1])
    assert error.value.code == code


def test_a_model_object_without_its_tokenizer(toy: tuple[Any, Any]) -> None:
    with pytest.raises(kvlens.ModelError) as error:
        kvlens.run("a text", model=toy[0])
    assert error.value.code == "tokenizer_missing"


def test_a_model_that_is_not_whole_or_in_two_dtypes(toy: tuple[Any, Any]) -> None:
    broken = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = float("nan")
    mixed = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    mixed.lm_head.half()
    for model in (broken, mixed):
        with pytest.raises(kvlens.ModelError) as error:
            kvlens.load_model(model, toy[1])
        assert error.value.code == "unsupported_model"


@pytest.mark.parametrize("place", [{"dtype": "bfloat16"}, {"device": "cuda"}])
def test_a_loaded_model_is_not_moved_or_converted(toy: tuple[Any, Any], place: dict[str, str]) -> None:
    with pytest.raises(kvlens.ModelError) as error:
        kvlens.run("a text", model=toy[0], tokenizer=toy[1], **place)
    assert error.value.code == "model_is_loaded"
    assert error.value.values["value"] in place.values()
