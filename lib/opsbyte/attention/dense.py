"""Dense softmax attention: the plain reference for everything in this folder.

    out = softmax(scale · q kᵀ + mask) v        Vaswani et al. 2017, arXiv 1706.03762

Every query scores every visible key; the weighted mean of the values is the
answer. Key heads may serve several query heads: one each (MHA), one for a
group (GQA, arXiv 2305.13245), one for all (MQA, arXiv 1911.02150). The T×T
scores go to slow memory and come back twice: that is what FlashAttention saves.
"""
from __future__ import annotations

import torch
from torch import Tensor

from opsbyte.attention import _check
from opsbyte.traffic import Traffic


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    traffic: Traffic | None = None,
) -> Tensor:
    """Softmax attention with all scores in memory.

    q `(B, Hq, Tq, D)`, k `(B, Hkv, Tk, D)`, v `(B, Hkv, Tk, Dv)`; returns
    `(B, Hq, Tq, Dv)` in q's dtype. Query head h reads key head h // (Hq/Hkv).

    causal: the last query is aligned with the last key, none sees ahead.
    window: each query sees that many keys, its own included (causal only).
    sinks: so many first keys stay visible outside the window.
    scale: of the scores, 1/sqrt(D) by default.
    traffic: counts what three separate kernels (scores, softmax, mean) move.

    A row that sees no key is zero. Half precision accumulates in float32.
    Raises ValueError on shapes, dtypes, devices or options that do not fit.
    """
    _check.check_tensors(q, k, v)
    _check.check_mask(causal, window, sinks)
    scale = _check.resolve_scale(scale, q.shape[-1])
    Tq, Tk, kv_heads = q.shape[2], k.shape[2], k.shape[1]
    mask = visible(
        range(Tk - Tq, Tk), range(Tk),
        causal=causal, window=window, sinks=sinks, device=q.device,
    )
    rows = accumulator(group(q, kv_heads))             # (B, Hkv, G·Tq, D)
    if mask is not None:
        mask = mask.repeat(q.shape[1] // kv_heads, 1)  # (G·Tq, Tk)

    scores = rows * scale @ accumulator(k).mT          # (B, Hkv, G·Tq, Tk)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)        # rows that see nothing
    out = weigh(weights, accumulator(v), mask)         # (B, Hkv, G·Tq, Dv)

    out = out.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype)
    if traffic is not None:
        square = scores.numel() * q.element_size()
        traffic.load(q, k), traffic.store(square)
        traffic.load(square), traffic.store(square)
        traffic.load(square, v), traffic.store(out)
    return out


def visible(
    queries: range, keys: range,
    *, causal: bool, window: int | None, sinks: int, device: torch.device,
) -> Tensor | None:
    """Which key positions each query position sees, `(Tq, Tk)` of bool.

    None when every query sees every key, which saves making the mask.
    """
    if not causal or not queries or not keys:
        return None
    ahead = keys[-1] > queries[0]
    behind = window is not None and queries[-1] - keys[0] >= window
    if not ahead and not behind:
        return None
    rows = torch.arange(queries[0], queries[-1] + 1, device=device)
    columns = torch.arange(keys[0], keys[-1] + 1, device=device)
    distance = rows[:, None] - columns                 # 0 is the own key
    mask = distance >= 0
    if window is not None:
        mask &= (distance < window) | (columns < sinks)
    return mask


def weigh(weights: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """`weights @ values`, letting nothing through from values a row can't see.

    Weights there are 0, but 0·NaN is NaN. So the product takes the finite
    values, and the others are added to the rows that do see them.
    """
    if mask is None:
        return weights @ values
    finite = values.isfinite()
    if finite.all():
        return weights @ values
    out = weights @ values.where(finite, 0)
    for j in (~finite).any(-1).flatten(0, -2).any(0).nonzero().flatten():
        rest = values[..., j, None, :].where(~finite[..., j, None, :], 0)
        seen = mask[..., :, j, None]
        out = out + (weights[..., :, j, None] * rest).where(seen, 0)
    return out


def group(q: Tensor, kv_heads: int) -> Tensor:
    """Stack the query heads of each key head as rows: `(B, Hkv, G·T, D)`."""
    B, H, T, D = q.shape
    return q.reshape(B, kv_heads, H // kv_heads * T, D)


def accumulator(x: Tensor) -> Tensor:
    """x in the dtype to compute in: float32 for half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def wide(x: Tensor) -> Tensor:
    """x in float64, or as it is on Apple's GPUs, which have no float64."""
    return x if x.device.type == "mps" else x.double()


def attention_bytes(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    value_dim: int | None = None,
    itemsize: int = 2,
) -> int:
    """Bytes that `attention` moves: four times the square, the rest once.

    With N queries and keys of dimension d, a head, 16 bit: 8 N² + 8 N d.
    """
    dims = head_dim + (head_dim if value_dim is None else value_dim)
    square = heads * queries * keys
    return batch * itemsize * (
        4 * square + heads * queries * dims + kv_heads * keys * dims
    )
