"""The share of a step's bytes that no method can save."""

from __future__ import annotations

from typing import Any

import pytest
from support import random_llama

from kvlens.app.compare.readbound import weights_share
from kvlens.engine.models import step_parameters
from kvlens.meta import RunMeta


def test_the_share_counts_weights_and_full_kv_in_their_number_format() -> None:
    sizes = {"layers": 30, "q_heads": 9, "kv_heads": 3}
    info = {"parameters": 1, "step_parameters": 134_515_008}
    kv_bytes = 4096 * 30 * 3 * 64 * 2
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        meta = RunMeta.model_validate(sizes | {"model_info": info, "dtype": dtype, "full_kv_bytes": kv_bytes * size})
        assert weights_share(meta) == pytest.approx(134_515_008 / (134_515_008 + kv_bytes))
    assert weights_share(RunMeta.model_validate(sizes | {"model_info": info, "dtype": "float32"})) is None
    experts = {"model_info": {"parameters": 1}, "dtype": "float32", "full_kv_bytes": kv_bytes}
    assert weights_share(RunMeta.model_validate(sizes | experts)) is None
    assert weights_share(RunMeta.model_validate(sizes | {"dtype": "float32", "full_kv_bytes": kv_bytes})) is None


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_no_embedding_table_but_the_outputs(tied: bool) -> None:
    model: Any = random_llama(num_hidden_layers=1, tie_word_embeddings=tied).model
    unread = 0 if tied else model.get_input_embeddings().weight.numel()
    assert step_parameters(model) == sum(weight.numel() for weight in model.parameters()) - unread
    model.config.num_experts = 4
    assert step_parameters(model) is None
