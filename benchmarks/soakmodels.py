"""Model folders of the soak: a small random Llama, broken in sixty ways. Each must be refused in one sentence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.soakforks import forked

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
LAYERS, WIDTH, VOCABULARY = 2, 32, 64
TENSORS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
Break = Callable[[Path, random.Random], None]


def whole(folder: Path) -> None:
    """A folder that loads."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=256)).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def _config(**fields: Any) -> Break:
    def change(folder: Path, draw: random.Random) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def _tensors(edit: Callable[[dict[str, Any]], None]) -> Break:
    def change(folder: Path, draw: random.Random) -> None:
        from safetensors.torch import load_file, save_file

        results = load_file(folder / WEIGHTS)
        edit(results)
        save_file(results, folder / WEIGHTS, {"format": "pt"})

    return change


def _bytes(name: str, edit: Callable[[bytes, random.Random], bytes]) -> Break:
    def change(folder: Path, draw: random.Random) -> None:
        path = folder / name
        path.write_bytes(edit(path.read_bytes() if path.exists() else b"", draw))

    return change


def _text(name: str, text: bytes) -> Break:
    return _bytes(name, lambda data, draw: text)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(1, len(data))]


def _name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}.weight"


def _absent(name: str) -> Break:
    return _tensors(lambda results: results.__delitem__(name))


def _value(name: str, number: float) -> Break:
    return _tensors(lambda results: results[name].view(-1)[7:9].fill_(number))


def _reshaped(name: str) -> Break:
    return _tensors(lambda results: results.update({name: results[name].reshape(2, -1).contiguous()}))


def _rope(**fields: Any) -> Break:
    return _config(rope_parameters=fields)


EACH = [_name(layer, part) for layer in range(LAYERS) for part in TENSORS]
BREAKS: list[Break] = [
    *[_absent(name) for name in EACH],
    *[_reshaped(name) for name in EACH[:6]],
    *[_value(name, float("nan")) for name in EACH[:4]],
    *[_value(name, float("inf")) for name in EACH[4:7]],
    *[_bytes(WEIGHTS, _cut)] * 8,
    *[_bytes(WEIGHTS, lambda data, draw: draw.randbytes(4000))] * 2,
    _bytes(WEIGHTS, lambda data, draw: b""),
    _bytes(WEIGHTS, lambda data, draw: b"\xff" * 8 + data[8:]),
    _bytes(WEIGHTS, lambda data, draw: bytes(8) + data[8:]),
    *[_bytes(CONFIG, _cut)] * 2,
    *[_text(CONFIG, text) for text in (b"", b"[]", b"3", b"{}", b"\xff\xfe")],
    *[_text(TOKENIZER, text) for text in (b"", b"[]", b'{"model": 3}')],
    _bytes("model.safetensors.index.json", lambda data, draw: b'{"weight_map": {"a": "../../etc/passwd"}}'),
    _config(num_hidden_layers=LAYERS + 48),
    _config(num_hidden_layers=0),
    _config(num_attention_heads=0),
    _config(num_key_value_heads=3),
    _config(vocab_size=10**9),
    _config(hidden_size=-WIDTH),
    _config(head_dim=7),
    _config(intermediate_size="wide"),
    _config(model_type="brain"),
    _config(hidden_act="wiggle"),
    _config(quantization_config={"quant_method": "gptq", "bits": 4}),
    _rope(rope_type="spiral", rope_theta=1e4),
    _rope(rope_type="yarn"),
]


def loaded(path: Path, model: Path, draw: random.Random, n: int) -> str:
    """How loading the folder ends that break `n` makes of `model`, which is made where it is not there yet."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  (once, not in every process)

    from kvlens.engine.models import load

    torch.set_num_threads(1)
    if not model.exists():
        forked(lambda: whole(model))
        assert forked(lambda: load(str(model)) and 0)[0] == "done", "the folder does not load before it is broken"
    folder = Path(shutil.copytree(model, path / "model"))
    BREAKS[n % len(BREAKS)](folder, draw)
    outcome, _ = forked(lambda: _as_the_commands_do(load, str(folder)))
    return "loaded" if outcome == "done" else outcome


def _as_the_commands_do(load: Callable[[str], object], folder: str) -> None:
    """A config may ask for more memory than there is: commands and pages say that in a sentence."""
    from kvlens.shortage import shortage

    try:
        load(folder)
    except RuntimeError as error:
        raise shortage(error, "load") or error from error
