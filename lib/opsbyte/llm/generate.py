"""Generate text one token at a time, and measure it as users feel it.

Time to first token (TTFT) is one pass over the whole prompt; time per output
token (TPOT) is one pass over one token.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from .transformer import Transformer, sdpa


@dataclass(frozen=True)
class Timing:
    """Seconds until the first token, and from each token to the next."""

    ttft: float
    steps: tuple[float, ...]
    prompt_tokens: int
    new_tokens: int

    @property
    def tpot(self) -> float:
        """Median seconds per token after the first; nan if there was only one."""
        return median(self.steps) if self.steps else float("nan")

    @property
    def tps(self) -> float:
        """Tokens per second after the first: 1 / tpot."""
        return 1 / self.tpot


@dataclass(frozen=True)
class Generation:
    """What was generated: `ids` without the token that ended it, and `text`."""

    text: str
    ids: list[int]
    prompt_ids: list[int]
    timing: Timing


def generate(
    model: Transformer,
    prompt: str | Sequence[int],
    max_tokens: int = 64,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    callback: Callable[[str], None] | None = None,
    cache=None,
    attention: Callable[..., Tensor] = sdpa,
) -> Generation:
    """Continue `prompt` (text or ids) by up to `max_tokens` tokens.

    Temperature 0 takes the likeliest token; otherwise see `probabilities`. Ends
    early at the model's end-of-sequence token or before a `stop` string.
    `callback` gets each piece of text as soon as it is final. A `cache` that
    already holds tokens is continued: the prompt comes after them.
    """
    prompt_ids = _ids(model, prompt)
    if not prompt_ids:
        raise ValueError("prompt: is empty; give at least one token")
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: allowed is 1 or more")
    if cache is None:
        cache = model.new_cache(len(prompt_ids) + max_tokens)
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    text = _Text(model.tokenizer, [stop] if isinstance(stop, str) else stop, callback)
    ids, times = prompt_ids, [perf_counter()]
    for _ in range(max_tokens):
        logits = model(torch.tensor([ids]), cache, attention, last_only=True)[0, -1]
        token = sample(logits, temperature, top_k, top_p, generator)
        times.append(perf_counter())
        if token in model.tokenizer.stop or text.add(token):
            break
        ids = [token]
    text.close()
    steps = [b - a for a, b in pairwise(times)]
    return Generation(
        text=text.written,
        ids=text.ids,
        prompt_ids=prompt_ids,
        timing=Timing(steps[0], tuple(steps[1:]), len(prompt_ids), len(text.ids)),
    )


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> int:
    """One token from logits (vocab,); the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    drawn = probabilities(logits, temperature, top_k, top_p)
    return int(torch.multinomial(drawn.cpu(), 1, generator=generator))


def probabilities(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """The distribution that tokens are drawn from: (…, vocab) to the same.

    First softmax(logits / temperature). Then `top_k` keeps the k likeliest
    tokens, and `top_p` the fewest likeliest whose sum reaches p (nucleus
    sampling, arXiv 1904.09751, section 3.1). What is kept is rescaled to sum 1.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: allowed is above 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: allowed is 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: allowed is above 0, at most 1")
    p, order = (logits.float() / temperature).softmax(-1).sort(-1, descending=True)
    if top_k is not None:
        p[..., top_k:] = 0
    if top_p is not None:
        p /= p.sum(-1, keepdim=True)
        p[p.cumsum(-1) - p >= top_p] = 0  # the sum without it is enough already
    p /= p.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, p)


def nll(
    model: Transformer,
    text: str | Sequence[int],
    *,
    cache=None,
    attention: Callable[..., Tensor] = sdpa,
    chunk: int = 512,
) -> Tensor:
    """Negative log-likelihood, in nats, of each token given those before it.

    Float32 of shape (tokens - 1,): the first token has nothing before it.
    Perplexity is exp of the mean. Runs `chunk` tokens a pass through `cache`.
    """
    ids = torch.tensor(_ids(model, text))
    if len(ids) < 2:
        raise ValueError(f"text: {len(ids)} tokens; at least 2 are needed")
    if cache is None:
        cache = model.new_cache(len(ids))
    losses = []
    for given, target in zip(ids[:-1].split(chunk), ids[1:].split(chunk), strict=True):
        logits = model(given[None], cache, attention)[0].cpu()
        losses.append(F.cross_entropy(logits, target, reduction="none"))
    return torch.cat(losses)


def _ids(model: Transformer, text: str | Sequence[int]) -> list[int]:
    return model.tokenizer.encode(text) if isinstance(text, str) else list(text)


class _Text:
    """Text as it grows token by token, given out in pieces that are final.

    A character may take several tokens, and a stop string may begin in the text
    so far: what could still change is held back.
    """

    def __init__(self, tokenizer, stop: Sequence[str], callback):
        self._tokenizer, self._stop, self._callback = tokenizer, stop, callback
        self.ids: list[int] = []
        self.written = ""
        self._held = ""
        self._start = self._end = 0  # tokens whose text is complete: ids[:end]

    def add(self, token: int) -> bool:
        """Take a token in; True if a stop string ended the text."""
        self.ids.append(token)
        # Decoding a few tokens again gives the new ones the context they need.
        before = self._tokenizer.decode(self.ids[self._start : self._end])
        after = self._tokenizer.decode(self.ids[self._start :])
        if after.endswith("\ufffd"):  # the middle of a character
            return False
        self._start, self._end = self._end, len(self.ids)
        return self._release(after[len(before) :])

    def close(self) -> None:
        """No token follows: give out what was held back."""
        before = self._tokenizer.decode(self.ids[self._start : self._end])
        after = self._tokenizer.decode(self.ids[self._start :])
        if not self._release(after[len(before) :]):
            self._write(self._held)
        self._held = ""

    def _release(self, piece: str) -> bool:
        held = self._held + piece
        found = [held.find(stop) for stop in self._stop if stop in held]
        if found:
            self._write(held[: min(found)])
            self._held = ""
            return True
        keep = max((_overlap(held, stop) for stop in self._stop), default=0)
        self._write(held[: len(held) - keep])
        self._held = held[len(held) - keep :]
        return False

    def _write(self, piece: str) -> None:
        self.written += piece
        if piece and self._callback:
            self._callback(piece)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next(n for n in range(longest, -1, -1) if text.endswith(stop[:n]))
