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

from opsbyte.attention._recurrence import check_form, check_recurrent, first_state
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

    Raises ValueError on shapes, dtypes, devices or names that do not fit.
    """
    check_recurrent(q, k, v)
    check_form(form, ("recurrent", "parallel", "chunkwise"), chunk)
    phi = _resolve(feature_map)
    B, kv_heads, T, V = v.shape
    features = phi(k[:, :, :0]).shape[-1]
    shape = (B, kv_heads, features, V + normalize)
    state = first_state(initial_state, shape, q).flatten(0, 1)
    q_rows = q.unflatten(1, (kv_heads, -1)).flatten(0, 1)  # (B·Hkv, G, T, K)
    k_rows, v_rows = k.flatten(0, 1), v.flatten(0, 1)

    # The parallel form is one chunk, the recurrent form chunks of one step.
    size = {"recurrent": 1, "parallel": max(T, 1), "chunkwise": chunk}[form]
    update = _step if form == "recurrent" else _chunk
    outs = []
    for start in range(0, T, size):
        now = slice(start, start + size)
        tile = q_rows[:, :, now], k_rows[:, now], v_rows[:, now]
        if traffic is not None:
            traffic.load(*tile, state)
        out, state = update(*_lift(*tile, phi, normalize), state)
        outs.append(_finish(out, normalize).to(q.dtype))
        if traffic is not None:
            traffic.store(outs[-1], state)

    out = torch.cat(outs, 2) if outs else q_rows.new_zeros(*q_rows.shape[:3], V)
    out = out.unflatten(0, (B, kv_heads)).flatten(1, 2)    # (B, Hq, T, V)
    return (out, state.unflatten(0, (B, kv_heads))) if return_state else out


def _step(Q: Tensor, K: Tensor, V: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: one step writes k vᵀ into the state, then q reads it."""
    S = S + K.mT * V                                # (N, K, 1) * (N, 1, V)
    return Q @ S[:, None], S                        # (N, G, 1, V)


def _chunk(Q: Tensor, K: Tensor, V: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Many steps: masked weights among them, the state for all before them."""
    rows = Q.flatten(1, 2)                          # (N, G·C, K)
    weights = torch.bmm(rows, K.mT).unflatten(1, Q.shape[1:3])
    weights = weights.tril_().flatten(1, 2)         # (N, G·C, C)
    out = torch.baddbmm(torch.bmm(rows, S), weights, V)
    return out.unflatten(1, Q.shape[1:3]), torch.baddbmm(S, K.mT, V)


def _lift(Q, K, V, phi, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's features; the key sum is the state of one more value, always 1."""
    Q, K, V = phi(accumulator(Q)), phi(accumulator(K)), accumulator(V)
    return Q, K, F.pad(V, (0, 1), value=1.0) if normalize else V


def _finish(out: Tensor, normalize: bool) -> Tensor:
    """Divide by the weights' sum, the last column, if there is one."""
    if not normalize:
        return out
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
