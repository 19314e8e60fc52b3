"""The key-value cache: what a transformer remembers between passes.

A pass over T new tokens needs the keys and values of all earlier ones. They
depend on nothing later, so they are computed once and kept.

A cache is any object with three members; the transformer knows no more of it:

- `length`: tokens seen so far, which is the position of the next one;
- `attend(layer, q, k, v, attention)`: take in the new keys and values of one
  layer, return the attention's output for the new queries;
- `advance(tokens)`: called once a pass, after its last layer.

Shapes: q (B, Hq, T, D), k and v (B, Hkv, T, D), rotary angles already applied.
"""
from __future__ import annotations

import torch

from opsbyte.models import ModelConfig


class KVCache:
    """Contiguous memory for `max_tokens` tokens, allocated once.

    Set `length` to a smaller number to forget the newest tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        *,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if not 0 < max_tokens <= (config.max_tokens or max_tokens):
            raise ValueError(
                f"max_tokens={max_tokens}: {config.name} allows 1 to "
                f"{config.max_tokens}"
            )
        mixer = config.layers[0].mixer
        shape = (len(config.layers), batch, mixer.kv_heads, max_tokens, mixer.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.max_tokens = max_tokens
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes in use by the tokens seen so far."""
        return (self.keys.nbytes + self.values.nbytes) * self.length // self.max_tokens

    def attend(self, layer: int, q, k, v, attention) -> torch.Tensor:
        """Append k and v, then attend to everything: (B, Hq, T, D)."""
        end = self.length + k.shape[2]
        if end > self.max_tokens:
            raise ValueError(
                f"cache: {self.length} tokens and {k.shape[2]} new ones do not fit "
                f"into max_tokens={self.max_tokens}"
            )
        keys, values = self.keys[layer], self.values[layer]
        if k.shape[0] != keys.shape[0]:
            raise ValueError(
                f"cache: made for a batch of {keys.shape[0]}, got {k.shape[0]}"
            )
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return attention(q, keys[:, :, :end], values[:, :, :end], causal=True)

    def advance(self, tokens: int) -> None:
        """The pass over `tokens` new tokens is complete."""
        self.length += tokens
