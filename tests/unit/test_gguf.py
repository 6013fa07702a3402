"""GGUF files: weights and tokenizer as they were before llama.cpp's conversion, against a second reader; and files that
are damaged."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from ggufs import letters, stock, write
from safetensors.numpy import load_file
from support import raises_code
from tokenizers import Tokenizer
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from kvlens.engine.models import load
from kvlens.models.convert import convert
from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import resolve, smollm2_file
from kvlens.models.gguf import llama3_factors

IDS = [[5, 9, 260, 17, 44, 2, 91, 256, 7]]


def silent(what: str, done: int, total: int) -> None:
    pass


def refused(path: Path, **more: Any) -> str:
    """The sentence with which a file is refused."""
    folder = path.parent / "made"
    folder.mkdir(exist_ok=True)
    with pytest.raises(UnsupportedModel) as said:
        convert(path, folder, silent, **more)
    text = str(said.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_the_model_before_its_conversion(family: str, tmp_path: Path) -> None:
    model = stock(family, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    read = load(str(write(tmp_path / "m.gguf", model, family)))
    read.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        ours, theirs = (m(torch.tensor(IDS)).logits for m in (read.model, model))
    assert torch.equal(ours, theirs)
    assert read.shape.kv_heads == 2
    assert read.eos == {299}


@pytest.mark.slow
def test_smollm2_is_what_a_second_reader_reads(smollm2_folder: Path) -> None:
    """The second reader is the gguf package's, and transformers' undoes the permutation of q and k."""
    ours = load_file(smollm2_folder / "model.safetensors")
    undo = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    seen, moved = set(), []
    for tensor in gguf.GGUFReader(smollm2_file()).tensors:
        raw = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in whole:
            name = whole[tensor.name]
        else:
            _, layer, part, ending = tensor.name.split(".")
            name = f"model.layers.{layer}.{names[part]}.{ending}"
        theirs = undo.process(raw, tensor.name).weights
        assert np.array_equal(ours[name], theirs.astype(ours[name].dtype)), name
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            moved.append(float(np.abs(ours[name].astype(np.float32) - raw).max()))
        seen.add(name)
    assert seen == set(ours)
    assert min(moved) > 0.1, "unpermuted rows are other rows"


def test_digits_are_split_one_by_one(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    for text, numbers in (("The code is 48213.", ["4", "8", "2", "1", "3"]), ("In 1969, 12 of 300", list("196912300"))):
        tokens = tokenizer.encode(text).tokens
        assert [token for token in tokens if token.strip("Ġ").isdigit()] == numbers
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    licence = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
    assert tokenizer.decode(tokenizer.encode(licence).ids) == licence
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").tokens == [
        "<|im_start|>",
        "user",
        "Ċ",
        "hi",
        "<|im_end|>",
    ]


def test_the_split_is_the_one_the_file_names(tmp_path: Path) -> None:
    def tokens(split: str) -> list[str]:
        path = write(tmp_path / f"{split}.gguf", stock("llama"), "llama", {"tokenizer.ggml.pre": split})
        folder = tmp_path / split
        folder.mkdir()
        convert(path, folder, silent)
        return Tokenizer.from_file(str(folder / "tokenizer.json")).encode("12 the").tokens

    assert tokens("gpt-2") == ["12", "Ġ", "th", "e"]
    assert tokens("smollm") == ["1", "2", "Ġ", "th", "e"]
    assert tokens("qwen2") == ["1", "2", "Ġ", "th", "e"]
    assert tokens("llama-bpe") == ["12", "Ġ", "th", "e"]


def test_sentence_pieces(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    pieces += [f"<extra{at}>" for at in range(300 - len(pieces))]
    scores = [0.0] * 259 + [-float(at) for at in range(41)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 41,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    path, folder = write(tmp_path / "s.gguf", stock("llama"), "llama", fields), tmp_path / "s"
    folder.mkdir()
    convert(path, folder, silent)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab é").tokens == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("bab").tokens == ["<s>", "▁", "b", "ab"]
    assert tokenizer.decode(tokenizer.encode("ab é").ids) == "ab é"


def test_quantised_weights_become_half_precision(tmp_path: Path) -> None:
    model, kind = stock("llama", hidden_size=64, intermediate_size=96), gguf.GGMLQuantizationType.Q8_0
    folder = Path(resolve(str(write(tmp_path / "q.gguf", model, "llama", kind=kind))))
    ours = load_file(folder / "model.safetensors")
    stored = model.model.layers[0].mlp.up_proj.weight.detach().numpy()
    wanted = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind).astype(np.float16)
    np.testing.assert_array_equal(ours["model.layers.0.mlp.up_proj.weight"], wanted)
    assert ours["model.norm.weight"].dtype == np.float32


def test_llama3s_scaling_of_rope_is_recognised(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = {"rope_freqs.weight": llama3_factors(5000.0, 16, 32.0).astype(np.float32)}
    folder = Path(resolve(str(write(tmp_path / "r.gguf", stock("llama"), "llama", tensors=factors))))
    config = LlamaConfig.from_pretrained(folder)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5000.0 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / scaled, torch.from_numpy(factors["rope_freqs.weight"]), atol=1e-4, rtol=1e-4)
    odd = {"rope_freqs.weight": np.full(8, 3.0, np.float32)}
    with raises_code("rope_factors", UnsupportedModel):
        resolve(str(write(tmp_path / "o.gguf", stock("llama"), "llama", tensors=odd)))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "experts": ({"llama.expert_count": 4}, {}, "has experts"),
    "window": ({"llama.attention.sliding_window": 64}, {}, "sliding window"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, {}, "scales RoPE (yarn)"),
    "partial": ({"llama.rope.dimension_count": 8}, {}, "partial RoPE"),
    "no heads": ({"llama.attention.head_count": None}, {}, "lacks the field 'llama.attention.head_count'"),
    "heads 0": ({"llama.attention.head_count": 0}, {}, "not a positive number"),
    "no split named": ({"tokenizer.ggml.pre": None}, {}, "tokenizer.ggml.pre"),
    "a shard": ({"split.no": 0, "split.count": 2}, {}, "one of 2 files of a split model"),
    "strange split": ({"tokenizer.ggml.pre": "martian"}, {}, "by the rule 'martian'"),
    "strange tokenizer": ({"tokenizer.ggml.model": "t5"}, {}, "a tokenizer of kind 't5'"),
    "tokens twice": ({"tokenizer.ggml.tokens": ["a"] * 300}, {}, "tokens that occur twice"),
    "merges of nothing": ({"tokenizer.ggml.merges": ["zz yy"]}, {}, "its tokenizer cannot be made"),
    "a strange tensor": ({}, {"blk.0.ssm_in.weight": np.zeros((4, 4), np.float32)}, "'blk.0.ssm_in.weight'"),
    "no number": (
        {},
        {"blk.1.ffn_up.weight": np.full((96, 64), np.nan, np.float32)},
        "'blk.1.ffn_up.weight' has values",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_cannot_be_converted(case: str, tmp_path: Path) -> None:
    fields, tensors, expected = REFUSED[case]
    assert expected in refused(write(tmp_path / "m.gguf", stock("llama"), "llama", fields, tensors))


def test_another_architecture_and_a_wrong_hash(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", stock("llama"), "bert")
    assert "architecture 'bert', which" in refused(path)
    whole = write(tmp_path / "w.gguf", stock("llama"), "llama")
    assert "0" * 12 in refused(whole, sha256="0" * 64), "the hash that was expected"


def test_a_truncated_or_overwritten_file_is_one_sentence(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", stock("llama"), "llama").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 9, 24, 60, 500, 5000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        said = refused(path)
        assert any(words in said for words in ("cut short", "not a GGUF file")), (size, said)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    assert "is not a GGUF file" in refused(path)
    path.write_bytes(whole[:4] + b"\x00\x00\x00\x03" + whole[8:])
    assert "versions 2 and 3" in refused(path)
    rng = np.random.default_rng(0)
    for at in rng.integers(8, 6000, 150).tolist():
        broken = bytearray(whole)
        broken[at] ^= 0xFF
        path.write_bytes(broken)
        folder = tmp_path / "any"
        folder.mkdir(exist_ok=True)
        with suppress(UnsupportedModel):  # anything else that is raised would be a traceback for the user
            convert(path, folder, silent)


def test_the_vocabulary_of_the_helper_is_whole() -> None:
    assert len(letters()) == len(set(letters())) == 300
