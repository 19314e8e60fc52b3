"""Linear attention: softmax's exp(q·k) replaced by φ(q)·φ(k).

Katharopoulos et al. 2020, arXiv 2006.16236 (equations 4 to 12).

    o_t = φ(q_t)ᵀ S_t,   S_t = Σ_{s≤t} φ(k_s) v_sᵀ       unnormalised

A product of three matrices may start at either end: (φ(Q) φ(K)ᵀ) V takes T²
work, φ(Q) (φ(K)ᵀ V) takes T. The causal mask sits between the first two, so the
second order needs a running state: per step (recurrent) or per chunk.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from opsbyte.attention._recurrence import (
    check_form,
    check_recurrent,
    finite,
    first_state,
    segments,
)
from opsbyte.attention.dense import accumulator
from opsbyte.traffic import Traffic

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu+1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
}


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = "elu+1",
    normalize: bool = True,
    form: str = "chunkwise",
    chunk: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    traffic: Traffic | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal linear attention, without a scale.

    q `(B, Hq, T, K)`, k `(B, Hkv, T, K)`, v `(B, Hkv, T, V)`; returns
    `(B, Hq, T, V)` in q's dtype. Query head h reads key head h // (Hq/Hkv).

    feature_map: a name in FEATURE_MAPS or a function of `(…, K)`.
    normalize: divide by φ(q_t)ᵀ Σ φ(k_s), so that weights sum to 1. A row whose
        divisor is 0 gives zeros.
    form: "recurrent", "parallel" or "chunkwise", all the same function.
    initial_state, and the one returned with return_state: `(B, Hkv, K', V)`
        float32 (float64 for float64 input), K' the feature dimension. With
        normalize it is `(B, Hkv, K', V + 1)`; the last column is Σ φ(k_s).
    traffic: counts a kernel per chunk (recurrent: per step) as `linear_bytes`.

    What is not finite at a step changes no answer before it.
    Raises ValueError on shapes, dtypes, devices or names that do not fit.
    """
    check_recurrent(q, k, v)
    chunk = check_form(form, ("recurrent", "parallel", "chunkwise"), chunk, q.shape[2])
    phi = _resolve(feature_map)
    query, key, value = phi(accumulator(q)), phi(accumulator(k)), accumulator(v)
    if normalize:  # the key sum is the state of one more value that is always 1
        value = F.pad(value, (0, 1), value=1.0)
    B, heads, T, _ = k.shape
    shape = (B, heads, key.shape[-1], value.shape[-1])
    state = first_state(initial_state, shape, q).flatten(0, 1)
    rows = query.unflatten(1, (heads, -1)).flatten(0, 1)   # (B·Hkv, G, T, K')
    args = rows, key.flatten(0, 1), value.flatten(0, 1), state

    def count(start: int, stop: int) -> None:
        """One tile: its queries, keys, values and the state in, two out."""
        if traffic is not None:
            now = slice(start, stop)
            traffic.load(q[:, :, now], k[:, :, now], v[:, :, now], state)
            traffic.store(v[:, :1, now].expand(-1, q.shape[1], -1, -1), state)

    if form == "recurrent":
        out, state = _recurrent(*args, count)
    else:  # the parallel form is one chunk
        out, state = _chunkwise(*args, chunk, count)
        if not finite(out):
            out, state = _recurrent(*args, lambda start, stop: None)
    out = _divide(out) if normalize else out
    out = out.unflatten(0, (B, heads)).flatten(1, 2).to(q.dtype)
    return (out, state.unflatten(0, (B, heads))) if return_state else out


def _recurrent(q, k, v, S: Tensor, count) -> tuple[Tensor, Tensor]:
    """The definition, step by step: write k vᵀ into the state, then read q."""
    outs = [q[:, :, :0] @ S[:, None]]
    for t in range(k.shape[1]):
        S = S + k[:, t, :, None] * v[:, t, None]    # (N, K, V)
        outs.append(q[:, :, t, None] @ S[:, None])  # (N, G, 1, V)
        count(t, t + 1)
    return torch.cat(outs, 2), S


def _chunkwise(q, k, v, S: Tensor, chunk: int, count) -> tuple[Tensor, Tensor]:
    """Masked weights within a chunk, the state for all the chunks before."""
    (N, G, T, _), V = q.shape, v.shape[-1]
    out = v.new_empty(N, G, -(-T // chunk), chunk, V)
    for span, (q, k, v) in segments(chunk, q, k, v):
        rows = q.flatten(2, 3)                      # (chunks, N, G·C, K)
        weights = (rows @ k.mT).unflatten(2, (G, chunk)).tril_().flatten(2, 3)
        answers = weights @ v                       # (chunks, N, G·C, V)
        tiles = zip(rows.unbind(), k.mT.unbind(), v.unbind(), strict=True)
        for c, (rows, k, v) in enumerate(tiles):
            answers[c].baddbmm_(rows, S)
            S = torch.baddbmm(S, k, v)
            start = (span.start + c) * chunk
            count(start, min(start + chunk, T))
        out[:, :, span] = answers.unflatten(2, (G, chunk)).movedim(0, 2)
    return out.flatten(2, 3)[:, :, :T], S


def _divide(out: Tensor) -> Tensor:
    """Answers over the sum of their weights, the last column; 0 if that is 0."""
    weight = out[..., -1:]
    nothing = weight == 0
    return (out[..., :-1] / weight.masked_fill(nothing, 1)).masked_fill(nothing, 0)


def _resolve(feature_map) -> Callable[[Tensor], Tensor]:
    if callable(feature_map):
        return feature_map
    if feature_map not in FEATURE_MAPS:
        names = ", ".join(FEATURE_MAPS)
        raise ValueError(
            f"feature_map: got {feature_map!r}, want one of {names} or a function"
        )
    return FEATURE_MAPS[feature_map]


def linear_bytes(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    tokens: int,
    key_dim: int,
    value_dim: int,
    chunk: int = 64,
    normalize: bool = False,
    itemsize: int = 2,
    state_itemsize: int = 4,
) -> int:
    """Bytes that `linear_attention` moves, features as many as key_dim.

    Queries, keys, values and answers once; the state in and out once a chunk:
    chunk 1 is the recurrent form, chunk = tokens the parallel one (its T×T
    weights kept in fast memory, however large).
    """
    once = tokens * (key_dim + value_dim) * (heads + kv_heads) * itemsize
    state = kv_heads * key_dim * (value_dim + normalize) * state_itemsize
    chunks = math.ceil(tokens / chunk)
    return batch * (once + 2 * chunks * state)
