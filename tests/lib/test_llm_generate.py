"""Generation: sampling, stopping, streaming, likelihoods."""
from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from opsbyte import llm

PROMPT = "Once upon a time"


class Script:
    """Stands in for a model: says the tokens it was given, one after another."""

    def __init__(self, tokenizer, ids):
        self.tokenizer, self.script = tokenizer, list(ids)

    def new_cache(self, max_tokens):
        return None

    def __call__(self, ids, cache, attention, last_only):
        logits = torch.zeros(1, 1, 49152)
        logits[0, 0, self.script.pop(0)] = 10
        return logits


def script(smollm, text):
    return Script(smollm.tokenizer, smollm.tokenizer.encode(text) + [2])


MULTIBYTE = "naïve café: 日本語, עברית, 🤗🏽‍🚀 – ½ ∑ done"


def test_streaming_gives_whole_characters(smollm):
    ids = smollm.tokenizer.encode(MULTIBYTE)
    assert len(ids) > len(MULTIBYTE.split()) * 3  # characters of several tokens
    pieces = []
    out = llm.generate(script(smollm, MULTIBYTE), "x", 200, callback=pieces.append)
    assert out.text == "".join(pieces) == MULTIBYTE
    assert "\ufffd" not in "".join(pieces) and all(pieces)
    assert out.ids == ids and len(pieces) > 10


def test_streaming_of_broken_characters(smollm):
    # The last character lacks bytes, and an earlier one is cut off by a letter.
    ids = smollm.tokenizer.encode("🤗 ok")[1:] + smollm.tokenizer.encode("🤗")[:-1]
    pieces = []
    model = Script(smollm.tokenizer, [*ids, 2])
    out = llm.generate(model, "x", 50, callback=pieces.append)
    assert out.text == "".join(pieces) == smollm.tokenizer.decode(ids)
    assert "\ufffd" in out.text and " ok" in out.text


def test_streaming_of_the_real_model(smollm):
    pieces = []
    out = llm.generate(smollm, PROMPT, 20, callback=pieces.append)
    assert "".join(pieces) == out.text == smollm.tokenizer.decode(out.ids)
    assert len(pieces) > 15


@pytest.mark.parametrize(("stop", "expected"), [
    ("four", "one two three "),
    ([" two", "three"], "one"),
    ("e four fi", "one two thre"),       # begins and ends inside tokens
    (["sixx", "e ten"], "one two three four five six seven eight nine"),
    ("one", ""),
])
def test_stop_strings(smollm, stop, expected):
    text = "one two three four five six seven eight nine"
    pieces = []
    model = script(smollm, text)
    out = llm.generate(model, "x", 50, stop=stop, callback=pieces.append)
    assert out.text == "".join(pieces) == expected


def test_stops_at_end_of_sequence(smollm):
    model = Script(smollm.tokenizer, [504, 3575, 2, 282])
    out = llm.generate(model, "x", 10)
    assert out.ids == [504, 3575] and model.script == [282]
    assert out.timing.new_tokens == 2 and len(out.timing.steps) == 2
    assert smollm.tokenizer.stop == {2}


def test_greedy_is_the_argmax_of_a_full_pass(smollm):
    out = llm.generate(smollm, PROMPT, 12)
    ids = torch.tensor([out.prompt_ids + out.ids])
    best = smollm(ids)[0].argmax(-1)
    assert best[len(out.prompt_ids) - 1 : -1].tolist() == out.ids


def test_prompt_as_ids_and_continued_cache(smollm):
    once = llm.generate(smollm, PROMPT, 12)
    assert llm.generate(smollm, once.prompt_ids, 12).ids == once.ids
    cache = smollm.new_cache(64)
    smollm(torch.tensor([once.prompt_ids[:3]]), cache)
    rest = llm.generate(smollm, once.prompt_ids[3:], 12, cache=cache)
    assert rest.ids == once.ids
    assert cache.length == len(once.prompt_ids) + 11


def test_seeds(smollm):
    def draw(seed, **options):
        options = {"temperature": 1.0} | options
        return llm.generate(smollm, PROMPT, 12, seed=seed, **options).ids

    assert draw(1) == draw(1) != draw(2)
    greedy = llm.generate(smollm, PROMPT, 12).ids
    assert draw(3, top_k=1, temperature=2.0) == greedy
    assert draw(4, top_p=1e-6) == draw(5, temperature=1e-4) == greedy


def test_probabilities_by_hand():
    p = torch.tensor([0.1, 0.5, 0.15, 0.25])
    logits = p.log() + 3  # a constant changes nothing

    def check(expected, **options):
        out = llm.probabilities(logits, **options)
        torch.testing.assert_close(out, torch.tensor(expected), rtol=1e-5, atol=1e-7)

    check([0.1, 0.5, 0.15, 0.25])
    check([0, 2 / 3, 0, 1 / 3], top_k=2)
    check([0.0, 1.0, 0.0, 0.0], top_p=0.5 - 1e-3)
    check([0, 2 / 3, 0, 1 / 3], top_p=0.5 + 1e-3)
    check([0, 0.5 / 0.9, 0.15 / 0.9, 0.25 / 0.9], top_p=0.8)
    check([0.1, 0.5, 0.15, 0.25], top_p=1.0, top_k=9)
    # Top p counts within what top k left: 2/3 is enough for 0.6.
    check([0.0, 1.0, 0.0, 0.0], top_k=2, top_p=0.6)
    squares = p**2 / (p**2).sum()
    check(squares.tolist(), temperature=0.5)
    rows = llm.probabilities(torch.stack([logits, logits.flip(0)]), top_k=2)
    torch.testing.assert_close(rows[0], rows[1].flip(0))


def test_samples_follow_the_distribution():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)
    draws = 4000
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[llm.sample(logits, 1.0, None, 0.8, generator)] += 1
    expected = torch.tensor([0, 0.5, 0.15, 0.25]) / 0.9 * draws
    assert counts[0] == 0
    chi_square = ((counts - expected)[1:] ** 2 / expected[1:]).sum()
    assert chi_square < 13.8  # 2 degrees of freedom: exceeded once in 1000


def test_timing(smollm):
    timing = llm.generate(smollm, PROMPT, 6).timing
    assert (timing.prompt_tokens, timing.new_tokens) == (4, 6)
    assert timing.ttft > 0 and len(timing.steps) == 5 and min(timing.steps) > 0
    assert timing.tpot == sorted(timing.steps)[2]
    assert timing.tps == 1 / timing.tpot
    assert math.isnan(llm.generate(smollm, PROMPT, 1).timing.tpot)


def test_nll(smollm):
    text = "The quick brown fox jumps over the lazy dog."
    ids = torch.tensor(smollm.tokenizer.encode(text))
    log_p = smollm(ids[None])[0].double().log_softmax(-1)
    expected = -log_p[:-1].gather(1, ids[1:, None])[:, 0]
    for options in ({}, {"chunk": 3}, {"chunk": 1}):
        out = llm.nll(smollm, text, **options)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(llm.nll(smollm, ids.tolist()), llm.nll(smollm, text))
    torch.testing.assert_close(llm.nll(smollm, ids), llm.nll(smollm, text))


def test_chat(smollm, smollm_golden):
    assert llm.chat_prompt("What is 7 plus 5?") == smollm_golden[1]["prompt"]
    assert llm.chat_prompt("Hi", system="Be brief.").startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


@pytest.mark.parametrize(("options", "message"), [
    ({"prompt": ""}, "prompt: is empty"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": 9000}, "max_tokens=9001: .* 1 to 8192"),
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
    ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
    ({"cache": SimpleNamespace(length=8192), "prompt": [1]}, "8193 tokens"),
])
def test_bad_arguments(smollm, options, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(smollm, **({"prompt": "x"} | options))


def test_nll_needs_two_tokens(smollm):
    with pytest.raises(ValueError, match="1 tokens; at least 2"):
        llm.nll(smollm, [5])
