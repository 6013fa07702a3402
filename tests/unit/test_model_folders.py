"""Model folders of strangers: whatever is wrong with one, loading it ends in one sentence, and nothing missing is made
up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import BASE

from kvlens.engine.models import UnsupportedModel, load

Change = Callable[[Path], None]
WEIGHTS, FIRST = "model.safetensors", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer of words, as a folder that loads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**BASE)).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{at}": at for at in range(BASE["vocab_size"])}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], None]) -> Change:
    def change(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        edit(found)
        save_file(found, folder / WEIGHTS, {"format": "pt"})

    return change


def content(name: str, data: bytes | Callable[[bytes], bytes]) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(data(path.read_bytes()) if callable(data) else data)

    return change


def larger_vocabulary(folder: Path) -> None:
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    said["model"]["vocab"] |= {f"more{at}": 512 + at for at in range(10)}
    path.write_text(json.dumps(said))


def without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def value(number: float) -> Change:
    return tensors(lambda found: found[FIRST][3].fill_(number))


def index_of_nothing(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {FIRST: "model-2.safetensors"}}))


CASES: dict[str, tuple[Change, str]] = {
    "more layers than weights": (config(num_hidden_layers=50), "its files lack the tensor model.layers.10."),
    "fewer layers than weights": (config(num_hidden_layers=2), "that its config has no place for"),
    "one tensor absent": (tensors(lambda found: found.__delitem__(FIRST)), f"lack the tensor {FIRST}."),
    "one tensor too many": (
        tensors(lambda found: found.update({"model.layers.0.extra": torch.zeros(2)})),
        "the tensor model.layers.0.extra that its config has no place for",
    ),
    "another name": (
        tensors(lambda found: found.update({"model.layers.0.self_attn.w_q.weight": found.pop(FIRST)})),
        f"lack the tensor {FIRST}.",
    ),
    "another shape": (
        tensors(lambda found: found.update({FIRST: torch.zeros(32, 64)})),
        f"tensor {FIRST} has the shape [32, 64], its config asks for [64, 64]",
    ),
    "another width": (config(hidden_size=32), "has the shape"),
    "NaN": (value(float("nan")), f"tensor {FIRST} has values that are no numbers"),
    "infinite": (value(float("-inf")), f"tensor {FIRST} has values that are no numbers"),
    "weights cut short": (content(WEIGHTS, lambda data: data[: len(data) // 2]), "is damaged or cut short"),
    "weights cut in the header": (content(WEIGHTS, lambda data: data[:50]), "is damaged or cut short"),
    "weights empty": (content(WEIGHTS, b""), "is damaged or cut short"),
    "weights garbage": (content(WEIGHTS, b"\x93NUMPY" * 4000), "is damaged or cut short"),
    "weights of nothing": (content(WEIGHTS, b"\x02\0\0\0\0\0\0\0{}"), "holds no tensors"),
    "an index of files that are not there": (index_of_nothing, "model-2.safetensors is missing"),
    "an index that is none": (content("model.safetensors.index.json", b"[1]"), "index.json cannot be read"),
    "heads 0": (config(num_attention_heads=0), "num_attention_heads = 0"),
    "KV heads that do not divide": (config(num_key_value_heads=3), "8 query heads cannot share 3 KV heads"),
    "layers negative": (config(num_hidden_layers=-1), "num_hidden_layers = -1"),
    "heads a word": (config(num_attention_heads="eight"), "num_attention_heads"),
    "vocabulary 0": (config(vocab_size=0), "vocab_size = 0"),
    "unknown RoPE": (
        config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        "asks for a RoPE of type 'spiral', which is not known",
    ),
    "a RoPE without its numbers": (config(rope_parameters={"rope_type": "yarn"}), "could not be loaded"),
    "bitsandbytes": (
        config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "has quantised weights",
    ),
    "GPTQ": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "has quantised weights"),
    "unknown activation": (config(hidden_act="wiggle"), "could not be loaded"),
    "config not JSON": (content("config.json", b"{"), "could not be loaded"),
    "config a list": (content("config.json", b"[]"), "could not be loaded"),
    "config of nothing": (content("config.json", b"{}"), "could not be loaded"),
    "unknown family": (config(model_type="brain"), "could not be loaded"),
    "tokenizer not JSON": (content("tokenizer.json", b"{"), "could not be loaded"),
    "tokenizer of another form": (content("tokenizer.json", b'{"model": 3}'), "could not be loaded"),
    "no tokenizer": (without_tokenizer, "could not be loaded"),
    "another model's tokenizer": (larger_vocabulary, "its tokenizer has tokens up to number 521, its model embeds 512"),
}


def test_the_folder_is_whole_before_it_is_broken(whole: Path) -> None:
    assert load(str(whole)).shape.layers == 3


@pytest.mark.parametrize("case", CASES)
def test_a_broken_folder_is_one_sentence(case: str, whole: Path, tmp_path: Path) -> None:
    change, expected = CASES[case]
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    change(folder)
    with pytest.raises(UnsupportedModel) as said:
        load(str(folder))
    text = str(said.value)
    assert expected in text
    assert "\n" not in text
    assert text.endswith(".")
    assert len(text) < 500


def test_tied_embeddings_need_no_head_of_their_own(tmp_path: Path, whole: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    tensors(lambda found: found.__delitem__("lm_head.weight"))(folder)
    with pytest.raises(UnsupportedModel, match=r"lack the tensor lm_head\.weight"):
        load(str(folder))
    config(tie_word_embeddings=True)(folder)
    assert load(str(folder)).shape.layers == 3


def test_what_every_model_computes_anew_may_be_there(tmp_path: Path, whole: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(3)}
    tensors(lambda found: found.update(old))(folder)
    assert load(str(folder)).shape.layers == 3
