"""The weights of a Llama folder in plain PyTorch, and the parts of a layer around its attention."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import rms_norm, silu


class Llama:
    """A decoder in float32. `token_bytes`: keys and values of one token in all layers."""

    def __init__(self, folder: Path) -> None:
        about = json.loads((folder / "config.json").read_text())
        self.layers = about["num_hidden_layers"]
        self.q_heads, self.kv_heads = about["num_attention_heads"], about["num_key_value_heads"]
        self.dim, self.eps, self.stop = about["head_dim"], about["rms_norm_eps"], about["eos_token_id"]
        self.group = self.q_heads // self.kv_heads
        theta = (about.get("rope_parameters") or about)["rope_theta"]
        self.frequencies = theta ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        self.weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
        self.tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.token_bytes = 2 * self.layers * self.kv_heads * self.dim * 4

    def text(self, token: int) -> str:
        return self.tokens.decode([token], skip_special_tokens=False)

    def embed(self, ids: list[int]) -> Tensor:
        return self.weights["model.embed_tokens.weight"][ids]

    def project(self, layer: int, x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [n, query heads, d], keys and values [n, KV heads, d] of tokens from position `start` on."""
        w, name = self.weights, f"model.layers.{layer}."
        x = rms_norm(x, x.shape[-1:], w[name + "input_layernorm.weight"], self.eps)
        q, k, v = ((x @ w[f"{name}self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, self.dim)) for p in "qkv")
        angle = torch.arange(start, start + len(x))[:, None, None] * self.frequencies
        cos, sin, half = angle.cos().tile(2), angle.sin().tile(2), self.dim // 2
        q, k = (t * cos + torch.cat((-t[..., half:], t[..., :half]), -1) * sin for t in (q, k))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of q [n, query heads, d] over k and v [m, KV heads, d] where read [query heads, n, m] is True.
        Returns the output [n, query heads, d] and the weights [query heads, n, m]."""
        k, v = (t.repeat_interleave(self.group, 1) for t in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) / self.dim**0.5
        weights = scores.masked_fill(~read, -torch.inf).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", weights, v), weights

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        w, name = self.weights, f"model.layers.{layer}."
        x = x + attended.flatten(1) @ w[name + "self_attn.o_proj.weight"].T
        h = rms_norm(x, x.shape[-1:], w[name + "post_attention_layernorm.weight"], self.eps)
        gate, up = h @ w[name + "mlp.gate_proj.weight"].T, h @ w[name + "mlp.up_proj.weight"].T
        return x + (silu(gate) * up) @ w[name + "mlp.down_proj.weight"].T

    def logits(self, x: Tensor) -> Tensor:
        x = rms_norm(x, x.shape[-1:], self.weights["model.norm.weight"], self.eps)
        return x @ self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"]).T
