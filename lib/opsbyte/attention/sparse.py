"""Native sparse attention: read summaries of all, the text of a few, the last w.

Yuan et al. 2025, arXiv 2502.11089, section 3. Blocks are pooled by their mean
here, in place of the paper's learned network, and do not overlap.

Three answers, mixed by gates: over one pooled key a block (compressed); over the
tokens of the blocks whose pooled keys scored best (selected, one choice for the
query heads that share a key head); over the last w tokens (window). A query
reads T/block + count·block + w keys instead of T.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opsbyte.attention import _check
from opsbyte.attention._recurrence import check_gate
from opsbyte.attention.dense import accumulator, weigh
from opsbyte.attention.flash import flash_attention


def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    *,
    block_size: int = 64,
    block_count: int = 16,
    window: int = 512,
    scale: float | None = None,
) -> Tensor:
    """Causal sparse attention; the defaults are the paper's sizes.

    q `(B, Hq, Tq, D)`, k `(B, Hkv, Tk, D)`, v `(B, Hkv, Tk, Dv)`; returns
    `(B, Hq, Tq, Dv)` in q's dtype. The last query is aligned with the last key;
    query head h reads key head h // (Hq/Hkv).

    gates: for compressed, selected, window; each `(B, Hq, Tq)`, used as given.
    block_count: blocks selected, at least 3: the first, the query's own and the
        one before always are.
    window: keys that the window sees, the query's own included.
    scale: of the scores, 1/sqrt(D) by default.

    Raises ValueError on shapes, dtypes, devices or sizes that do not fit.
    """
    for name, gate in zip(("gates[0]", "gates[1]", "gates[2]"), gates, strict=True):
        check_gate(name, gate, q, (tuple(q.shape[:3]),))
    sizes = {"block_size": block_size, "scale": scale}
    compressed, weights = compressed_attention(q, k, v, **sizes)
    blocks = select_blocks(
        weights, queries=q.shape[2], keys=k.shape[2], kv_heads=k.shape[1],
        block_size=block_size, block_count=block_count,
    )
    selected = selected_attention(q, k, v, blocks, **sizes)
    near = flash_attention(q, k, v, window=window, scale=scale)
    outs = (accumulator(x) for x in (compressed, selected, near))
    pairs = zip(gates, outs, strict=True)
    return sum(accumulator(g).unsqueeze(-1) * out for g, out in pairs).to(q.dtype)


def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_size: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the mean key and value of each whole block.

    A block is visible once its last token is. Returns the answers, as
    `native_sparse_attention`, and the weights `(B, Hq, Tq, Tk // block_size)`,
    float32 or, for float64 input, float64. A query that sees no block gets zeros.
    """
    _check.check_tensors(q, k, v)
    _check.check_count("block_size", block_size)
    scale = _check.resolve_scale(scale, q.shape[-1])
    kv_heads, whole = k.shape[1], k.shape[2] // block_size
    K, V = (
        accumulator(x[:, :, : whole * block_size])
        .unflatten(2, (whole, block_size)).mean(3) for x in (k, v)
    )                                                   # (B, Hkv, blocks, D)
    at = _positions(q, k)
    ends = torch.arange(1, whole + 1, device=q.device) * block_size - 1
    seen = (ends <= at[:, None]).repeat(q.shape[1] // kv_heads, 1)

    rows = accumulator(q).unflatten(1, (kv_heads, -1)).flatten(2, 3)
    scores = (rows * scale @ K.mT).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~seen, 0)  # (B, Hkv, G·Tq, blocks)
    out = weigh(weights, V, seen)
    return (
        out.reshape(*q.shape[:3], v.shape[3]).to(q.dtype),
        weights.reshape(*q.shape[:3], whole),
    )


def select_blocks(
    weights: Tensor, *, queries: int, keys: int, kv_heads: int,
    block_size: int, block_count: int,
) -> Tensor:
    """Which blocks each query reads in full: `(B, Hkv, Tq, block_count)` of ids.

    weights: of the compressed branch; their mean over a key head's query heads
    ranks the blocks. The first block, the query's own and the one before are
    always in. Best first; −1 where there are fewer blocks to choose from.
    """
    _check.check_count("block_count", block_count, least=3)
    total = -(-keys // block_size)
    score = weights.detach().unflatten(1, (kv_heads, -1)).mean(2)  # (B, Hkv, Tq, whole)
    score = F.pad(score, (0, total - score.shape[-1]))

    block = torch.arange(total, device=weights.device)
    at = torch.arange(keys - queries, keys, device=weights.device)[:, None]
    own = at.div(block_size, rounding_mode="floor")
    always = (block == 0) | (block == own) | (block == own - 1)
    visible = (block + 1) * block_size - 1 <= at
    score = score.masked_fill(~visible, -1).masked_fill(always & (block <= own), 2)
    best, ids = score.topk(min(block_count, total), -1)
    ids = ids.masked_fill(best < 0, -1)
    return F.pad(ids, (0, block_count - ids.shape[-1]), value=-1)


def selection_mask(blocks: Tensor, *, keys: int, block_size: int) -> Tensor:
    """The selection as a mask `(B, Hkv, Tq, keys)`: what the fast form computes."""
    token = torch.arange(keys, device=blocks.device)
    chosen = (blocks[..., None] == token // block_size).any(-2)
    at = torch.arange(keys - blocks.shape[2], keys, device=blocks.device)
    return chosen & (token <= at[:, None])


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    block_size: int,
    scale: float | None = None,
) -> Tensor:
    """Attention over the tokens of the blocks chosen, gathered query by query.

    blocks: as from `select_blocks`, `(B, Hkv, Tq, n)`, each id once; −1 is none.
    Time and memory follow n·block_size, not Tk.
    """
    _check.check_tensors(q, k, v)
    scale = _check.resolve_scale(scale, q.shape[-1])
    B, kv_heads, keys, _ = k.shape
    tokens = blocks.shape[-1] * block_size              # keys gathered a query
    pad = -keys % block_size
    K, V = (                                            # (B, Hkv, blocks, size·D)
        F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, block_size)).flatten(3)
        for x in (k, v)
    )
    b = torch.arange(B, device=q.device)[:, None, None, None]
    h = torch.arange(kv_heads, device=q.device)[:, None, None]
    inside = torch.arange(block_size, device=q.device)
    rows = accumulator(q).unflatten(1, (kv_heads, -1)).transpose(2, 3)
    at = _positions(q, k)
    outs = [rows.new_empty(B, kv_heads, 0, rows.shape[3], v.shape[3])]
    step = max(1, GATHERED // max(1, B * kv_heads * tokens))
    for start in range(0, q.shape[2], step):
        now = slice(start, start + step)
        ids = blocks[:, :, now]                         # (B, Hkv, t, n)
        token = (ids[..., None] * block_size + inside).flatten(3)
        seen = (token >= 0) & (token <= at[now, None])  # (B, Hkv, t, n·size)
        near = ids.clamp(min=0)
        key, value = (
            accumulator(x[b, h, near]).unflatten(-1, (block_size, -1)).flatten(3, 4)
            for x in (K, V)
        )                                               # (B, Hkv, t, n·size, D)
        value = value.masked_fill(~seen[..., None], 0)
        scores = rows[:, :, now] * scale @ key.mT       # (B, Hkv, t, G, n·size)
        scores = scores.masked_fill(~seen[..., None, :], -torch.inf)
        outs.append(scores.softmax(-1) @ value)
    out = torch.cat(outs, 2).transpose(2, 3).flatten(1, 2)
    return out.to(q.dtype)


# Keys gathered at once, over heads and queries: a few megabytes at usual sizes.
GATHERED = 16_384


def _positions(q: Tensor, k: Tensor) -> Tensor:
    """Where the queries stand among the keys; the last stands at the last.

    Raises ValueError if there are more queries than keys.
    """
    queries, keys = q.shape[2], k.shape[2]
    if queries > keys:
        raise ValueError(f"q: got {queries} queries, want at most the {keys} keys")
    return torch.arange(keys - queries, keys, device=q.device)
