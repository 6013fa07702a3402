"""The tokenizer that a GGUF file describes, as a tokenizer.json: byte-pair vocabularies (gpt2) and SentencePiece's
(llama).

The file names how text is split before merging (`tokenizer.ggml.pre`). That split is part of the model: without it,
digits for example are merged into pieces the model has never seen. So a name that is not known here is refused.
Split patterns: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvlens.models.errors import UnsupportedModel
from kvlens.models.ggufheader import Header

CONTROL, USER = 3, 4
"""token types: what never comes out of text by itself, and what the model's owner added"""
LONGEST_TOKEN = 4096
"""characters; a SentencePiece vocabulary is searched for every cut of every token"""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
PLAIN = ("gpt-2", "gpt2", "olmo", "phi-2", "jais", "mpt")
LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3")
QWEN = ("qwen2", "deepseek-r1-qwen", "megrez")


def vocabulary_of(header: Header, name: str) -> list[str]:
    """Return the tokens of a file. Raises UnsupportedModel for what is no list of texts of at most LONGEST_TOKEN
    characters."""
    tokens = header.need("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UnsupportedModel(f"'{name}' has a vocabulary that is no list of texts.")
    if max(map(len, tokens), default=0) > LONGEST_TOKEN:
        raise UnsupportedModel(
            f"'{name}' has a token of {max(map(len, tokens)):,} characters, at most {LONGEST_TOKEN:,} are read."
        )
    return tokens


def tokenizer_of(header: Header, name: str) -> Tokenizer:
    """Raises UnsupportedModel for a vocabulary of another kind, an unknown split, or lists that do not fit."""
    kind = header.need("tokenizer.ggml.model")
    tokens = vocabulary_of(header, name)
    if not tokens or len(set(tokens)) != len(tokens):
        raise UnsupportedModel(f"'{name}' has a vocabulary with tokens that occur twice, or none.")
    try:
        if kind == "gpt2":
            tokenizer = _byte_pairs(header, tokens, name)
        elif kind == "llama":
            tokenizer = _sentence_pieces(header, tokens, name)
        else:
            raise UnsupportedModel(f"'{name}' has a tokenizer of kind '{kind}'; gpt2 and llama are converted.")
    except UnsupportedModel:
        raise
    except Exception as error:  # the tokenizers library raises Exception itself
        raise UnsupportedModel(f"'{name}': its tokenizer cannot be made ({str(error)[:120]}).") from None
    _add_special(header, tokenizer, tokens)
    _frame(header, tokenizer, tokens)
    return tokenizer


def settings_of(header: Header, context: int) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by their text, the context length, the chat template."""
    tokens = header.need("tokenizer.ggml.tokens")
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for key, field in named.items():
        token_id = header.fields.get(f"tokenizer.ggml.{field}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            settings[key] = tokens[token_id]
    template = header.fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return settings | {"model_max_length": context}


def _byte_pairs(header: Header, tokens: list[str], name: str) -> Tokenizer:
    split = header.fields.get("tokenizer.ggml.pre")
    if not isinstance(split, str):
        raise UnsupportedModel(
            f"'{name}' does not name the rule by which its tokenizer splits text (tokenizer.ggml.pre): convert the "
            "model again with a newer converter, or give its folder of safetensors."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in header.need("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocabulary, merges, ignore_merges=split in LLAMA3)  # type: ignore[arg-type]
    tokenizer = Tokenizer(model)
    if split in SINGLE_DIGITS:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)  # type: ignore[assignment]
    elif split in PLAIN:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    elif split in LLAMA3 or split in QWEN:
        digits = r"\p{N}{1,3}" if split in LLAMA3 else r"\p{N}"
        pattern = pre_tokenizers.Split(Regex(_WORDS + digits + _REST), "isolated")
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pattern, bytewise])  # type: ignore[assignment]
        if split in QWEN:
            tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    else:
        raise UnsupportedModel(
            f"'{name}' splits text by the rule '{split[:40]}', which is not known here: "
            "give the model's folder of safetensors instead."
        )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def _sentence_pieces(header: Header, tokens: list[str], name: str) -> Tokenizer:
    scores = header.need("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise UnsupportedModel(f"'{name}' has {len(scores):,} scores for {len(tokens):,} tokens.")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[int(header.fields.get("tokenizer.ggml.unknown_token_id", 0))]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, _merges(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = bool(header.fields.get("tokenizer.ggml.add_space_prefix", True))
    prepends = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepends, normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    last = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    return tokenizer


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose joint token has the best score: the same as merges in the order of scores."""
    score = dict(zip(tokens, scores, strict=True))
    merges = [
        (-score[token], score[token[:cut]] + score[token[cut:]], token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    return [(remaining, right) for _, _, remaining, right in sorted(merges)]


def _add_special(header: Header, tokenizer: Tokenizer, tokens: list[str]) -> None:
    kinds = header.fields.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens([_added(token) for token, kind in zip(tokens, kinds, strict=False) if kind == CONTROL])
    tokenizer.add_tokens([_added(token) for token, kind in zip(tokens, kinds, strict=False) if kind == USER])


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _frame(header: Header, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Puts BOS before and EOS behind a text, where the file asks for it; SentencePiece's files ask for BOS unless they
    say no."""
    fields = header.fields
    pieces = fields.get("tokenizer.ggml.model") == "llama"
    ends = {
        "bos": fields.get("tokenizer.ggml.add_bos_token", pieces),
        "eos": fields.get("tokenizer.ggml.add_eos_token", False),
    }
    used = {end: fields.get(f"tokenizer.ggml.{end}_token_id") for end, flag in ends.items() if flag}
    named = {
        end: (tokens[token_id], token_id)
        for end, token_id in used.items()
        if isinstance(token_id, int) and 0 <= token_id < len(tokens)
    }
    if named:
        single = [*([named["bos"][0]] if "bos" in named else []), "$A", *([named["eos"][0]] if "eos" in named else [])]
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=single, special_tokens=list(dict.fromkeys(named.values()))
        )
