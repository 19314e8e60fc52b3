"""Tokenizers: the real one, and small ones built to show each rule."""
from __future__ import annotations

import random

import pytest
from opsbyte.llm import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6

TEXTS = [
    "", " ", "  two  spaces ", "Hello, world!", "it's we'll THEY'RE", "x = 3.14159;",
    "line\nline\r\n\ttab\n\n\n", "naïve 日本語 🤗", "1234567 tokens", "\u00a0 \u2009",
    "def f(x):\n    return x**2  # squared\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_decode_undoes_encode(smollm, text):
    assert smollm.tokenizer.decode(smollm.tokenizer.encode(text)) == text


def test_smollm_splits_digits(smollm):
    ids = smollm.tokenizer.encode("2024")
    assert [smollm.tokenizer.decode([i]) for i in ids] == list("2024")


def test_special_tokens(smollm):
    ids = smollm.tokenizer.encode("<|im_start|>user<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2 and len(ids) == 3
    assert smollm.tokenizer.decode(ids) == "user"
    assert smollm.tokenizer.vocab == 49152 and smollm.tokenizer.bos is None


def byte_level(pre, words=(), merges=(), **extra):
    letters = [chr(c) for c in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    tokens = ["<s>", "</s>", *letters, *words]
    return tokens, Tokenizer({
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | extra)


NUMBERS = ["12", "123", "45", "34"]
JOIN = ["1 2", "12 3", "4 5", "3 4"]


@pytest.mark.parametrize(("pre", "pieces"), [
    ("llama-bpe", ["<s>", "123", "45"]),
    ("gpt-2", ["123", "45"]),
    ("smollm", ["1", "2", "3", "4", "5"]),
])
def test_digits_by_pre_tokenizer(pre, pieces):
    tokens, tokenizer = byte_level(pre, NUMBERS, JOIN)
    assert [tokens[i] for i in tokenizer.encode("12345")] == pieces


def test_llama3_rules():
    # A merge across a cut never happens; one inside always does.
    words = ["Ġa", "!Ċ", "(x", "1234"]
    tokens, tokenizer = byte_level("llama-bpe", words, ["Ġ a", "! Ċ", "( x"])
    pieces = [tokens[i] for i in tokenizer.encode(" a!\n(x1234")]
    assert pieces == ["<s>", "Ġa", "!Ċ", "(x", *"1234"]
    # A word of the vocabulary stays whole without any merge that makes it.
    tokens, tokenizer = byte_level("llama-bpe", ["word"])
    assert [tokens[i] for i in tokenizer.encode("word")] == ["<s>", "word"]
    assert tokenizer.bos == 0
    tokens, tokenizer = byte_level("gpt-2", ["word"])
    assert [tokens[i] for i in tokenizer.encode("word")] == list("word")


def test_beginning_and_end_tokens():
    _, tokenizer = byte_level("smollm", **{"tokenizer.ggml.add_bos_token": True})
    assert tokenizer.encode("a")[0] == tokenizer.bos == 0
    _, tokenizer = byte_level("smollm", **{"tokenizer.ggml.eot_token_id": 7})
    assert tokenizer.stop == {1, 7} and tokenizer.bos is None


@pytest.mark.parametrize("pre", [None, "default", "qwen2"])
def test_unknown_pre_tokenizer(pre):
    with pytest.raises(ValueError, match=f"pre-tokenizer {pre!r}"):
        byte_level(pre)


def sentencepiece_vocab(rng):
    """Letters, and random strings of them with scores, as (token, score)."""
    letters = [*"abcd", "\u2581"]
    longer = set()
    while len(longer) < 40:
        longer.add("".join(rng.choices(letters, k=rng.randint(2, 4))))
    longer = sorted(longer)
    rng.shuffle(longer)
    return [(t, -float(i)) for i, t in enumerate(longer + letters)]


def merge_by_score(text, scores):
    """SentencePiece's BPE as defined: join the best pair until none is known."""
    pieces = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in
                 enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in scores]
        if not pairs:
            return pieces
        i = -max(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@pytest.mark.parametrize("seed", range(5))
def test_sentencepiece_against_its_definition(seed):
    rng = random.Random(seed)
    vocab = sentencepiece_vocab(rng)
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    tokens = special + [token for token, _ in vocab]
    tokenizer = Tokenizer({
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(special) + [s for _, s in vocab],
        "tokenizer.ggml.token_type":
            [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(vocab),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    })
    for _ in range(50):
        text = "".join(rng.choices("abcd  ", k=rng.randint(1, 30)))
        first, *ids = tokenizer.encode(text)
        assert first == tokenizer.bos == 1
        assert [tokens[i] for i in ids] == merge_by_score(text, dict(vocab))
        assert tokenizer.decode(ids) == text
    ids = tokenizer.encode("é")  # unknown letters fall back to bytes
    assert [tokens[i] for i in ids[-2:]] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "é"


def test_unknown_kind():
    with pytest.raises(ValueError, match="tokenizer 'bert' is not supported"):
        Tokenizer({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": [],
                   "tokenizer.ggml.token_type": []})
