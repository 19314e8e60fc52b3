"""A real language model: fetched, loaded, run, and measured.

    model = llm.load()
    print(llm.generate(model, "The capital of France is", max_tokens=8).text)
"""
from __future__ import annotations

from pathlib import Path

import torch

from .cache import KVCache
from .generate import Generation, Timing, generate, nll, probabilities, sample
from .tokenizer import Tokenizer, chat_prompt
from .transformer import Transformer, linear, sdpa
from .weights import Weights, read

__all__ = [
    "Generation", "KVCache", "Timing", "Tokenizer", "Transformer", "Weights",
    "chat_prompt", "generate", "linear", "load", "nll", "probabilities", "read",
    "sample", "sdpa",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load(
    dtype: str = "fp32",
    path: str | Path | None = None,
    device: str | torch.device | None = None,
    *,
    fused: bool = True,
    linear=linear,
) -> Transformer:
    """The course's model, SmolLM2-135M-Instruct, or the GGUF file at `path`.

    `dtype` is fp32, bf16 or fp16. `device` is "cpu" unless you name another,
    such as "cuda" or "mps". `fused=False` keeps each projection a product of its
    own; `linear(name, weight)` makes such a product.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: allowed are {', '.join(DTYPES)}")
    if path is None:
        from .fetch import fetch  # here, so that `python -m opsbyte.llm.fetch` works

        path = fetch()
    return Transformer(
        read(path), dtype=DTYPES[dtype], device=device or "cpu", fused=fused,
        linear=linear,
    )
