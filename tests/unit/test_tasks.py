"""The demo's generated tasks: lengths, places, determinism, scores, refusals."""

import pytest

from kvlens.demo import demo_path, language
from kvlens.demo.tasks import TASKS, make_prompt, score
from kvlens.lab.training.demo.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def encode():
    tokenizer = load_tokenizer(demo_path())
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def words(text):
    """Another tokenizer: one token per word."""
    return list(range(len(text.split())))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [300, 1024])
def test_length_is_met_but_never_exceeded(task, length, encode):
    for tokens in (encode, words):
        prompt = make_prompt(task, length, 0.5, 1, tokens)
        assert length - 16 <= 1 + len(tokens(prompt.text)) <= length


@pytest.mark.parametrize("task", TASKS)
def test_needle_offsets_cut_out_the_asked_facts(task, encode):
    prompt = make_prompt(task, 600, 0.5, 2, encode)
    sentences = [prompt.text[start:end] for start, end in prompt.needle]
    assert all(sentence.endswith(".") and sentence.count(".") == 1 for sentence in sentences)
    if task == "list":
        assert len(sentences) == 8
        assert all(f"{number} is " in sentence for number, sentence in zip(language.COUNT, sentences, strict=False))
    elif task == "chain":
        assert len(sentences) == 3
        for sentence in sentences:
            assert sentence[sentence.index("from ") : -1] in prompt.answer
    else:
        assert len(sentences) == 1
        assert prompt.answer.strip() in sentences[0]
        assert prompt.text.count(sentences[0]) == 1
    assert prompt.text.endswith("Answer:")


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("task", ["needle", "multikey"])
def test_depth(task, depth, encode):
    prompt = make_prompt(task, 1024, depth, 3, encode)
    document = prompt.text.index("\nQuestion:")
    start, end = prompt.needle[0]
    assert abs(start / (document - (end - start)) - depth) < 0.03
    if depth == 0.0:
        assert start == 0
    if depth == 1.0:
        assert end == document


FACT = "The access code of"


def test_multikey_has_others_of_the_kind_and_needle_has_none(encode):
    assert make_prompt("multikey", 1024, 0.5, 0, encode).text.count(FACT) == 9
    assert make_prompt("needle", 1024, 0.5, 0, encode).text.count(FACT) == 1


def test_same_seed_same_prompt_and_other_seed_other_value(encode):
    one, same, other = (make_prompt("needle", 512, 0.5, seed, encode) for seed in (7, 7, 8))
    assert one == same
    assert one.text != other.text
    values = {make_prompt("needle", 256, 0.5, seed, encode).answer for seed in range(30)}
    assert len(values) > 25


def test_own_sentences_as_haystack(encode):
    sentences = [f"Sentence number {i} of a text by somebody else." for i in range(200)]
    prompt = make_prompt("needle", 512, 0.5, 0, encode, filler=sentences)
    assert sentences[0] in prompt.text
    assert "Nobody in" not in prompt.text


def test_score():
    assert score("needle", " 4821.", " 4821.") == 1.0
    assert score("needle", " 4821.", " 4821.\nQuestion: more") == 1.0
    assert score("needle", " 4821.", " 4822.") == 0.0
    assert score("chain", " from A B to C D.", "") == 0.0
    answer = " gate one is 1111, gate two is 2222, gate three is 3333, gate four is 4444."
    assert score("list", answer, answer) == 1.0
    assert score("list", answer, " gate one is 1111, gate two is 9999, gate three is 3333") == 0.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("needles", 512, 0.5), "known tasks"),
        (("needle", 512, 1.5), "between 0 and 1"),
        (("needle", 20, 0.5), "at least"),
        (("list", 100, 0.5), "at least"),
        (("needle", 0, 0.5), "positive"),
    ],
)
def test_refusals_say_why(arguments, said, encode):
    with pytest.raises(ValueError, match=said):
        make_prompt(*arguments, 0, encode)
    with pytest.raises(ValueError, match="unknown kind"):
        make_prompt("needle", 512, 0.5, 0, encode, kind="shoe")
    with pytest.raises(ValueError, match="items"):
        make_prompt("list", 2048, 0.5, 0, encode, items=40)
