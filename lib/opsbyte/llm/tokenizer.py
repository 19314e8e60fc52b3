"""The tokenizer that a GGUF file carries, rebuilt with `tokenizers`.

Two kinds exist in Llama models: byte-level BPE (SmolLM2, Llama 3; "gpt2" in
GGUF) and SentencePiece BPE with byte fallback (Llama 1 and 2, Mistral; "llama").
"""
from __future__ import annotations

from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers import Tokenizer as _Tokenizer

# Token types of GGUF (llama.h, llama_token_type).
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u2581"  # what SentencePiece writes for a space


class Tokenizer:
    """Text to token ids and back.

    `vocab` is the number of ids, `bos` the token put before a text (or None),
    `stop` the ids that end an answer.
    """

    def __init__(self, metadata: dict):
        """Build it from the metadata of a GGUF file."""
        kind = metadata["tokenizer.ggml.model"]
        tokens = metadata["tokenizer.ggml.tokens"]
        types = metadata["tokenizer.ggml.token_type"]
        if kind == "gpt2":
            self._tokenizer = _byte_level(metadata, tokens)
        elif kind == "llama":
            self._tokenizer = _sentencepiece(metadata, tokens, types)
        else:
            raise ValueError(
                f"path: tokenizer {kind!r} is not supported, only 'gpt2' and 'llama'"
            )
        special = {t: i for i, t in enumerate(tokens) if types[i] == _CONTROL}
        self._tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in special]
        )
        self._tokenizer.add_tokens(
            [AddedToken(token, normalized=False)
             for i, token in enumerate(tokens) if types[i] == _USER_DEFINED]
        )
        self.vocab = len(tokens)
        first = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", first)
        self.bos = metadata["tokenizer.ggml.bos_token_id"] if add_bos else None
        self.stop = {metadata["tokenizer.ggml.eos_token_id"]}
        if "tokenizer.ggml.eot_token_id" in metadata:
            self.stop.add(metadata["tokenizer.ggml.eot_token_id"])
        # Chat models end a turn with one of these, whatever the file's end of text.
        turns = ("<|im_end|>", "<|eot_id|>")
        self.stop |= {special[token] for token in turns if token in special}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written out in it count as such."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self.bos is None else [self.bos, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def _byte_level(metadata: dict, tokens: list[str]) -> _Tokenizer:
    """BPE over bytes; the pre-tokenizer's name says how text is cut up first."""
    whole = False
    match pre := metadata.get("tokenizer.ggml.pre"):
        case "smollm":  # digits one by one
            digits = pre_tokenizers.Digits(individual_digits=True)
            cut = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        case "gpt-2":
            cut = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        case "llama-bpe":  # digits by threes; a word in the vocabulary stays whole
            whole = True
            cut = [
                pre_tokenizers.Split(Regex(_LLAMA3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        case _:
            raise ValueError(
                f"path: pre-tokenizer {pre!r} is not supported, only 'smollm', "
                "'gpt-2' and 'llama-bpe'"
            )
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = _Tokenizer(models.BPE(vocab, merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict, tokens: list[str], types: list[int]) -> _Tokenizer:
    """BPE that merges the pair whose union has the best score."""
    scores = metadata["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    plain = {t for t, i in vocab.items() if types[i] not in (_BYTE, _CONTROL)}
    merges = [
        (-scores[vocab[token]], token[:cut], token[cut:])
        for token in plain
        for cut in range(1, len(token))
        if token[:cut] in plain and token[cut:] in plain
    ]
    merges.sort(key=lambda m: (m[0], vocab[m[1]], vocab[m[2]]))
    unknown = tokens[types.index(_UNKNOWN)]
    tokenizer = _Tokenizer(models.BPE(
        vocab, [(left, right) for _, left, right in merges],
        unk_token=unknown, fuse_unk=True, byte_fallback=True,
    ))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE)] * prefix + [normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * prefix
    )
    return tokenizer


def chat_prompt(text: str, system: str | None = None) -> str:
    """One user turn in SmolLM2's chat format (ChatML), ready for the answer.

    Without `system` there is no system turn.
    """
    turns = [("system", system)] * (system is not None) + [("user", text)]
    written = (f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    return "".join(written) + "<|im_start|>assistant\n"
