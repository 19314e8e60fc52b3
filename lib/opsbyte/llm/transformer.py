"""A Llama-style transformer (arXiv 2307.09288), small enough to read.

Attention and cache are arguments, so that every chapter can bring its own. Made
for speed by four things, none of which changes the result beyond rounding:
projections that read the same input are one matrix product (`fused`), rotary
angles come from a table, the cache is allocated once, and on a CPU the matrices
are laid out ahead of time the way oneDNN wants to read them.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVCache
from .weights import Weights

Linear = Callable[[Tensor], Tensor]  # (…, in) -> (…, out)


def linear(name: str, weight: Tensor) -> Linear:
    """The product with `weight` (out, in), packed for oneDNN where that works.

    In bf16 on a CPU both layouts are kept: a single row is faster unpacked.
    """
    if weight.device.type == "cpu":
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            product = partial(_packed_product, packed)
            product(weight[:1])
        except (AttributeError, RuntimeError, NotImplementedError):
            pass  # this build of torch, or this processor, has no such form
        else:
            if weight.dtype == torch.bfloat16:
                return partial(_rows_or_row, product, weight)
            return product
    return partial(F.linear, weight=weight)


def _packed_product(packed: Tensor, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _rows_or_row(rows: Linear, weight: Tensor, x: Tensor) -> Tensor:
    """`rows(x)`; for a single row torch's own matrix-vector product.

    In bf16 it reads memory as fast as oneDNN's and has less to prepare for each
    call. A token takes 121 calls, so decode is a sixth faster.
    """
    if x.numel() != x.shape[-1]:
        return rows(x)
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        return F.linear(x, weight)
    finally:
        torch.backends.mkldnn.enabled = before


def sdpa(q, k, v, *, causal: bool = True, scale: float | None = None) -> Tensor:
    """torch's attention: q (B, Hq, T, D), k and v (B, Hkv, S, D) -> (B, Hq, T, D).

    Causal masks align the last query with the last key.
    """
    attend = partial(F.scaled_dot_product_attention, scale=scale)
    new, seen = q.shape[2], k.shape[2]
    if new == 1:
        # One query sees all keys. The query heads that share a key head become
        # queries of that head, so each key is read once.
        grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
        return attend(grouped, k, v).view(q.shape)
    if causal and q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return _by_blocks(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)
    if not causal or new == seen:
        return attend(q, k, v, is_causal=causal, enable_gqa=True)
    mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
    return attend(q, k, v, attn_mask=mask, enable_gqa=True)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention as matrix products over blocks of 128 queries.

    In bf16 torch's CPU operator does not reach the rate of a matrix product.
    """
    shared, new, seen = k.shape[1], q.shape[2], k.shape[2]
    q = (q * scale).unflatten(1, (shared, -1))  # (B, Hkv, group, T, D)
    out = torch.empty_like(q)
    for start in range(0, new, 128):
        block = q[:, :, :, start : start + 128]
        first = seen - new + start  # keys before it are seen by the whole block
        end = first + block.shape[3]
        scores = block.flatten(2, 3) @ k[:, :, :end].transpose(2, 3)
        scores = scores.unflatten(2, block.shape[2:4])
        future = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
        scores[..., first:].masked_fill_(future, -torch.inf)
        mixed = scores.softmax(-1).flatten(2, 3) @ v[:, :, :end]
        out[:, :, :, start : start + 128] = mixed.unflatten(2, block.shape[2:4])
    return out.flatten(1, 2)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each pair of neighbours in x (B, T, H, D) by its position's angle.

    `turns` (T, 1, D/2) are the complex numbers exp(i · position · frequency).
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


@dataclass(frozen=True)
class Block:
    """One layer's weights. Fused: `qkv` and `gate_up` have one product each."""

    attention_norm: Tensor
    qkv: tuple[Linear, ...]
    output: Linear
    mlp_norm: Tensor
    gate_up: tuple[Linear, ...]
    down: Linear


class Transformer:
    """The model: `model(ids)` gives the logits of every next token.

    `config` is its ModelConfig, `tokenizer` its tokenizer.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        fused: bool = True,
        linear: Callable[[str, Tensor], Linear] = linear,
    ):
        """`linear(name, weight)` makes the product with one weight matrix."""
        self.config, self.tokenizer = weights.config, weights.tokenizer
        self.dtype, self.device, self.eps = dtype, torch.device(device), weights.eps

        def tensor(*names: str) -> Tensor:
            parts = [weights.tensor(name).to(dtype) for name in names]
            return torch.cat(parts).to(device)

        def products(*names: str) -> tuple[Linear, ...]:
            if fused:
                return (linear("+".join(names), tensor(*names)),)
            return tuple(linear(name, tensor(name)) for name in names)

        def block(i: str) -> Block:
            return Block(
                attention_norm=tensor(i + "attn_norm"),
                qkv=products(i + "attn_q", i + "attn_k", i + "attn_v"),
                output=linear(i + "attn_output", tensor(i + "attn_output")),
                mlp_norm=tensor(i + "ffn_norm"),
                gate_up=products(i + "ffn_gate", i + "ffn_up"),
                down=linear(i + "ffn_down", tensor(i + "ffn_down")),
            )

        self.embedding = tensor("token_embd")
        self.blocks = [block(f"blk.{i}.") for i in range(len(self.config.layers))]
        self.norm = tensor("output_norm")
        head = self.embedding if self.config.tied else tensor("output")
        self.head = linear("output", head)
        positions = torch.arange(self.config.max_tokens, dtype=torch.float64)
        angles = torch.outer(positions, weights.frequencies)
        self.turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        self.turns = self.turns.to(torch.complex64).to(device)

    @torch.inference_mode()
    def __call__(
        self,
        ids: Tensor,
        cache=None,
        attention: Callable[..., Tensor] = sdpa,
        *,
        positions: Tensor | None = None,
        last_only: bool = False,
        layers: int | None = None,
    ) -> Tensor:
        """Logits (B, T, vocab) in float32 for the token after each of ids (B, T).

        With a `cache`, ids continue what it holds. `attention` gets q, k, v of
        one layer, as `opsbyte.attention.attention` does. `positions` (T,) or
        (B, T) default to the next ones. `last_only` gives the last position's
        logits alone, (B, 1, vocab). `layers` runs the first so many layers.
        """
        x = F.embedding(self._checked(ids), self.embedding)
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = slice(start, self._end(start + ids.shape[1]))
        turns = self.turns[positions]
        for i, block in enumerate(self.blocks[:layers]):
            q, k, v = self._qkv(block, x, turns)
            if cache is None:
                mixed = attention(q, k, v, causal=True)
            else:
                mixed = cache.attend(i, q, k, v, attention)
            x = x + block.output(mixed.transpose(1, 2).flatten(2))
            x = x + self._mlp(block, x)
        if cache is not None:
            cache.advance(ids.shape[1])
        if last_only:
            x = x[:, -1:]
        return self.head(self._rms_norm(x, self.norm)).float()

    def new_cache(self, max_tokens: int, batch: int = 1) -> KVCache:
        """An empty cache for this model, of its dtype and on its device."""
        return KVCache(
            self.config, max_tokens, batch=batch, dtype=self.dtype, device=self.device
        )

    def _qkv(self, block: Block, x: Tensor, turns: Tensor):
        """q (B, Hq, T, D), k and v (B, Hkv, T, D), with positions in q and k."""
        mixer = self.config.layers[0].mixer
        queries, both = mixer.heads, mixer.heads + mixer.kv_heads
        x = self._rms_norm(x, block.attention_norm)
        heads = [p(x).unflatten(-1, (-1, mixer.head_dim)) for p in block.qkv]
        if len(heads) == 1:  # fused: q and k are turned at once
            qk, v = heads[0][:, :, :both], heads[0][:, :, both:]
            qk = rotate(qk, turns)
            q, k = qk[:, :, :queries], qk[:, :, queries:]
        else:
            q, k, v = rotate(heads[0], turns), rotate(heads[1], turns), heads[2]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _mlp(self, block: Block, x: Tensor) -> Tensor:
        x = self._rms_norm(x, block.mlp_norm)
        parts = [product(x) for product in block.gate_up]
        gate, up = parts[0].chunk(2, dim=-1) if len(parts) == 1 else parts
        return block.down(F.silu(gate).mul_(up))

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _checked(self, ids: Tensor) -> Tensor:
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"ids: shape {tuple(ids.shape)} of {ids.dtype}; allowed is (batch, "
                "time) of torch.int64 or int32"
            )
        if ids.numel() == 0:
            raise ValueError(f"ids: shape {tuple(ids.shape)} holds no token")
        low, high = ids.min().item(), ids.max().item()
        if low < 0 or high >= self.config.vocab:
            raise ValueError(
                f"ids: from {low} to {high}; the vocabulary has 0 to "
                f"{self.config.vocab - 1}"
            )
        return ids.to(self.device)

    def _end(self, end: int) -> int:
        if end > self.config.max_tokens:
            raise ValueError(
                f"ids: {end} tokens are more than {self.config.name} can place: "
                f"{self.config.max_tokens}"
            )
        return end
