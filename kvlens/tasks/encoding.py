"""Counting tokens for a task's prompt with the tokenizer of a model, without loading the model or transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from kvlens.models.find import DEMO, resolve, stay_offline
from kvlens.tasks.base import Encoding
from kvlens.text.carried import reply_start
from kvlens.text.chat import ChatForm, choose, template_in


def encoding(
    model: str, chat: str = "auto", system: str | None = None, arguments: Mapping[str, Any] | None = None
) -> Encoding:
    """How the prompts of a model are counted, in the chat form where they will be fed in it.

    Raises UnsupportedModel, BadTemplate or ValueError with one sentence for a model that is not there."""
    if model == DEMO:
        from kvlens.demo.encode import demo_encode

        choose(None, chat, system, arguments=arguments)
        return Encoding(demo_encode())
    folder = Path(resolve(model))
    if (folder / "tokenizer.json").is_file():
        return encoding_in(folder, chat, system, arguments=arguments)
    return encoding_of(_transformers_tokenizer(folder, model), chat, system, arguments)


def token_ends(model: str, text: str) -> list[int]:
    """Return the character at which each token of a text ends; special tokens are left out. Raises as `encoding`."""
    folder = Path(resolve(model))
    if (folder / "tokenizer.json").is_file():
        tokenizer = _tokenizer(str(folder), (folder / "tokenizer.json").stat().st_mtime_ns)
        return [int(end) for _, end in tokenizer.encode(text, add_special_tokens=False).offsets]
    encoded = _transformers_tokenizer(folder, model)(text, add_special_tokens=False, return_offsets_mapping=True)
    return [int(end) for _, end in encoded["offset_mapping"]]


def _transformers_tokenizer(folder: Path, model: str) -> Any:
    stay_offline()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"the tokenizer of '{model}' could not be loaded: {first}") from error


def encoding_of(
    tokenizer: Any, chat: str = "auto", system: str | None = None, arguments: Mapping[str, Any] | None = None
) -> Encoding:
    """The same of a transformers tokenizer at hand."""
    from kvlens.text.chat import template_of

    form = choose(template_of(tokenizer), chat, system, arguments=arguments)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return Encoding(
        encode, int(tokenizer.num_special_tokens_to_add()) if form is None else _around(form, encode), form is not None
    )


def counting(
    model: str,
    chat: str = "auto",
    system: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> Callable[[], Encoding]:
    """Return what gives the encoding when prompts have to be counted: of a model by name, or of a tokenizer at hand. An
    argument that the chat template lacks is refused now. Raises BadTemplate."""
    if tokenizer is None:
        counted = partial(encoding, model, chat, system, arguments)
    else:
        counted = partial(encoding_of, tokenizer, chat, system, arguments)
    if arguments:
        counted()
    return counted


def encoding_in(
    folder: Path,
    chat: str = "auto",
    system: str | None = None,
    turns: Sequence[tuple[str, str]] = (),
    arguments: Mapping[str, Any] | None = None,
) -> Encoding:
    """The same of a folder with a tokenizer.json."""
    tokenizer = _tokenizer(str(folder), (folder / "tokenizer.json").stat().st_mtime_ns)
    form = choose(template_in(folder), chat, system, turns, arguments)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    special = int(tokenizer.num_special_tokens_to_add(False)) if form is None else _around(form, encode)
    return Encoding(encode, special, form is not None)


def first_turn_tokens(
    folder: Path, chat: str, system: str | None, turns: Sequence[tuple[str, str]], arguments: Mapping[str, Any] | None
) -> int:
    """Return the tokens of a conversation's first turn, up to its reply, with the tokenizer of a folder. turns: the
    earlier ones. Raises Refusal `nothing_to_carry` or `reply_not_found`."""
    form = choose(template_in(folder), chat, system, turns, arguments)
    opening, closing = ("", "") if form is None else (form.before, form.after)
    cut = reply_start(opening, closing, turns)
    tokenizer = _tokenizer(str(folder), (folder / "tokenizer.json").stat().st_mtime_ns)
    offsets = tokenizer.encode(opening, add_special_tokens=False).offsets
    return sum(end <= cut for _, end in offsets)


def _around(form: ChatForm, encode: Any) -> int:
    """Tokens that the chat form puts around a text."""
    word = "x"
    return len(encode(form.around(word)[0])) - len(encode(word))


@lru_cache(maxsize=4)
def _tokenizer(folder: str, changed: int) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ValueError(f"the tokenizer.json of '{folder}' cannot be read: {str(error)[:120]}") from None
