"""A hybrid stack: state space blocks with a few attention layers among them.

    x = x + block(RMSNorm(x))        for each block in the pattern

Most layers keep a state of fixed size, the attention layers keep keys and values of
every token (or of a window of them). As in Jamba (Lieber et al. 2024, arXiv
2403.19887, one attention layer in eight), attention has no position encoding here:
the state space layers below it already tell positions apart.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opsbyte.attention.dense import attention
from opsbyte.ssm._check import check, check_count
from opsbyte.ssm.mamba import MambaBlock, SSMState
from opsbyte.ssm.mamba2 import Mamba2Block


class KVState(NamedTuple):
    """What an attention layer remembers: it grows by a column a token."""

    k: Tensor  # (batch, Hkv, tokens, head_dim)
    v: Tensor


class AttentionBlock(nn.Module):
    """Causal attention with grouped keys, from and to `(batch, time, d_model)`.

    heads query heads of d_model / heads; kv_heads key heads, heads by default;
    window: keys that a token sees, its own included, all by default.
    Raises ValueError on sizes that do not fit.
    """

    def __init__(
        self,
        d_model: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        check_count("d_model", d_model)
        check_count("heads", heads)
        check_count("kv_heads", kv_heads)
        if window is not None:
            check_count("window", window)
        if d_model % heads:
            raise ValueError(f"heads: got {heads}, want a divisor of {d_model}")
        if heads % kv_heads:
            raise ValueError(f"kv_heads: got {kv_heads}, want a divisor of {heads}")
        self.dim, self.kv_heads, self.window = d_model // heads, kv_heads, window
        self.qkv_proj = nn.Linear(
            d_model, (heads + 2 * kv_heads) * self.dim, bias=False
        )
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def initial_state(self, batch: int) -> KVState:
        """The cache before the first token: no columns."""
        empty = self.out_proj.weight.new_zeros(batch, self.kv_heads, 0, self.dim)
        return KVState(empty, empty)

    def forward(
        self, x: Tensor, state: KVState | None = None, *, return_state: bool = False
    ) -> Tensor | tuple[Tensor, KVState]:
        """x `(batch, L, d_model)` to the same shape, and the cache after it."""
        check("x", x, ("batch", "L", self.out_proj.in_features), self.out_proj.weight)
        state = self.initial_state(len(x)) if state is None else state
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = qkv.split([qkv.shape[1] - 2 * self.kv_heads, *[self.kv_heads] * 2], 1)
        k, v = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
        y = attention(q, k, v, window=self.window)            # (batch, H, L, head_dim)
        y = self.out_proj(y.transpose(1, 2).flatten(-2))
        if not return_state:
            return y
        # The next token sees itself and window - 1 of these.
        drop = 0 if self.window is None else max(0, k.shape[2] - self.window + 1)
        return y, KVState(k[:, :, drop:].clone(), v[:, :, drop:].clone())

    def step(self, x: Tensor, state: KVState) -> tuple[Tensor, KVState]:
        """One token: x `(batch, d_model)` to the same shape, and the next cache."""
        y, state = self(x[:, None], state, return_state=True)
        return y[:, 0], state


class HybridStack(nn.Module):
    """Blocks of the given kinds on a residual stream `(batch, time, d_model)`.

    pattern: a kind per layer, of "mamba", "mamba2", "attention". The other three
    hold the keyword arguments of each kind's block.
    Raises ValueError on an unknown kind, and what the blocks raise.

    >>> HybridStack(64, ["mamba2"] * 3 + ["attention"], attention=dict(heads=4))
    """

    def __init__(
        self,
        d_model: int,
        pattern: Sequence[str],
        *,
        mamba: dict | None = None,
        mamba2: dict | None = None,
        attention: dict | None = None,
    ) -> None:
        super().__init__()
        kinds = {
            "mamba": (MambaBlock, mamba),
            "mamba2": (Mamba2Block, mamba2),
            "attention": (AttentionBlock, attention),
        }
        unknown = [kind for kind in pattern if kind not in kinds]
        if unknown or not pattern:
            raise ValueError(
                f"pattern: got {unknown or pattern!r}, want one or more of"
                f" {', '.join(kinds)}"
            )
        if "attention" in pattern and attention is None:
            raise ValueError("attention: got None, want at least dict(heads=…)")
        self.blocks = nn.ModuleList()
        for kind in pattern:
            block, options = kinds[kind]
            self.blocks.append(block(d_model, **(options or {})))
        self.norms = nn.ModuleList(nn.RMSNorm(d_model, eps=1e-5) for _ in pattern)

    def initial_state(self, batch: int) -> list[SSMState | KVState]:
        """One state a layer, each of its own kind."""
        return [block.initial_state(batch) for block in self.blocks]

    def forward(
        self,
        x: Tensor,
        state: list[SSMState | KVState] | None = None,
        *,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, list[SSMState | KVState]]:
        """x `(batch, L, d_model)` to the same shape, and the states after it."""
        state = self.initial_state(len(x)) if state is None else state
        after = []
        for norm, block, before in zip(self.norms, self.blocks, state, strict=True):
            y, new = block(norm(x), before, return_state=True)
            x = x + y
            after.append(new)
        return (x, after) if return_state else x

    def step(
        self, x: Tensor, state: list[SSMState | KVState]
    ) -> tuple[Tensor, list[SSMState | KVState]]:
        """One token: x `(batch, d_model)` to the same shape, and the next states."""
        after = []
        for norm, block, before in zip(self.norms, self.blocks, state, strict=True):
            y, new = block.step(norm(x), before)
            x = x + y
            after.append(new)
        return x, after


def state_bytes(state: list[SSMState | KVState]) -> dict[str, int]:
    """Bytes in a stack's states: "kv" grows with the tokens, "fixed" does not."""
    total = {"fixed": 0, "kv": 0}
    for layer in state:
        kind = "kv" if isinstance(layer, KVState) else "fixed"
        total[kind] += sum(t.numel() * t.element_size() for t in layer)
    return total
