"""The committed demo model: loads with transformers, reads any text, finds needles, is what its provenance says."""

import json
import random
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlens.demo import demo_path, language
from kvlens.lab.training.demo import english
from kvlens.lab.training.demo.export import FILES, sha256
from kvlens.lab.training.demo.loss import hidden_states, rope
from kvlens.lab.training.demo.measures import Demo, streaming
from kvlens.lab.training.demo.rows import KINDS, RowMaker, make_batch
from kvlens.lab.training.demo.schedule import STAGES, scaled_stages
from kvlens.lab.training.demo.tokenizer import Encoder

LENGTH = 512
SEEDS = range(900_000, 900_004)


@pytest.fixture(scope="module")
def demo():
    torch.manual_seed(0)
    return Demo.load(demo_path())


@pytest.fixture(scope="module")
def documents():
    return english.split(english.collect())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_path())


def test_size_and_provenance():
    files = [path for path in demo_path().iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16 * 2**20
    provenance = json.loads((demo_path() / "provenance.json").read_text())
    assert provenance["sha256"] == {name: sha256(demo_path() / name) for name in FILES}
    assert provenance["steps"] == provenance["steps_planned"]
    assert not re.search(r"/(tmp|work|home)/", json.dumps(provenance))


def test_shape():
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    config = model.config
    assert type(model).__name__ == "LlamaForCausalLM"
    assert 6 <= config.num_hidden_layers <= 8
    assert config.num_key_value_heads >= 2
    assert config.num_attention_heads // config.num_key_value_heads >= 4
    assert config.max_position_embeddings == 8192
    assert all(torch.isfinite(p).all() for p in model.parameters())


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_round_trips(text):
    tokenizer = _tokenizer()
    assume(not any(special in text for special in tokenizer.all_special_tokens))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert Encoder(tokenizer)(text) == ids


def _tokenizer(_memory=[]):  # noqa: B006 (hypothesis and fixtures of module scope do not mix)
    if not _memory:
        _memory.append(AutoTokenizer.from_pretrained(demo_path()))
    return _memory[0]


def test_beginning_of_text_and_offsets(tokenizer):
    text = "The code of gate one is 0427. Zürich, 東京."
    coded = tokenizer(text, return_offsets_mapping=True)
    assert coded["input_ids"][0] == tokenizer.bos_token_id
    assert coded["input_ids"].count(tokenizer.bos_token_id) == 1
    offsets = coded["offset_mapping"][1:]
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len(text)
    start = text.index("0427")
    assert [text[a:b].strip() for a, b in offsets if a < start + 4 and b > start] == list("0427")


def test_every_word_of_the_language_is_one_token(tokenizer):
    assert all(len(tokenizer.encode(" " + word, add_special_tokens=False)) == 1 for word in language.vocabulary())


@pytest.mark.parametrize("task", ["needle", "multikey"])
def test_finds_the_fact_with_full_cache(demo, task):
    right = [demo.score(demo.prompt(task, LENGTH, depth, seed)) for seed in SEEDS for depth in (0.0, 0.5, 1.0)]
    assert sum(right) >= len(right) - 1


def test_long_answers(demo):
    assert sum(demo.score(demo.prompt("chain", LENGTH, 0.2, seed)) for seed in SEEDS[:3]) >= 2
    assert demo.score(demo.prompt("list", LENGTH, 0.5, SEEDS[0])) >= 0.8


def test_controls(demo):
    for seed in SEEDS:
        prompt = demo.prompt("multikey", LENGTH, 0.5, seed)
        start, end = prompt.needle[0]
        gone = prompt.text[:start] + prompt.text[end + 1 :]
        assert demo.answer(gone, 8)[0].strip() != prompt.answer.strip()
        changed = prompt.text.replace(prompt.answer.strip(), "7305.")
        assert demo.answer(changed, 8)[0].strip() == "7305."


def test_streaming_loses_the_middle(demo):
    right = [demo.score(demo.prompt("needle", LENGTH, 0.5, seed), streaming(0.1)) for seed in SEEDS]
    assert sum(right) == 0


@pytest.mark.parametrize(("length", "copy", "real"), [(96, 0.5, 0.0), (512, 0.0, 0.3)])
def test_training_rows(length, copy, real, documents):
    maker = RowMaker(Encoder(_tokenizer()), documents[0][:40])
    rows, ids, position = make_batch(maker, random.Random(0), length, 12, real, copy, 0.5)
    assert ids.shape == position.shape == (12, length)
    assert (position.diff(dim=1) >= 1).all()
    text = maker.encode.tokenizer.decode
    for row in rows:
        for start, end, kind in row.answers:
            if KINDS[kind] != "copy":
                assert text(row.ids[:start]).endswith("Answer:")
                assert row.ids[end - 1] == maker.encode.eos


def test_held_out_documents_are_apart(documents):
    training, held_out = documents
    assert {d.name for d in training}.isdisjoint(d.name for d in held_out)
    flat = [{" ".join(p.split()) for d in part for p in d.paragraphs} for part in (training, held_out)]
    assert flat[0].isdisjoint(flat[1])
    assert len(held_out) >= 20


def test_training_forward_pass_is_the_stock_one(demo):
    ids = torch.randint(3, 2000, (2, 50), generator=torch.Generator().manual_seed(0))
    cos, sin = rope(torch.arange(50).expand(2, -1), 32, 100_000.0)
    with torch.no_grad():
        mine = hidden_states(demo.model, ids, cos, sin) @ demo.model.lm_head.weight.T
        assert torch.allclose(mine, demo.model(ids).logits, atol=1e-3)


def test_schedule_scales_in_steps():
    assert [stage.steps for stage in scaled_stages(5.5)] == [max(1, round(stage.steps / 10)) for stage in STAGES]
