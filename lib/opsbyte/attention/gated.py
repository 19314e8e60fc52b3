"""Gated linear attention: linear attention whose state fades.

Yang et al. 2023, arXiv 2312.06635; with one decay a head it is RetNet's (fixed,
arXiv 2307.08621) and Mamba-2's (arXiv 2405.21060) recurrence.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ,   o_t = S_tᵀ q_t

Unrolled, step j reaches step i through exp(g_{j+1} + … + g_i). So within a chunk
it is attention with q·k weighted by that decay; between chunks the state fades
by the whole chunk's decay. Every exponent below is a sum of g, so never above
0: splitting it as exp(b_i) · exp(−b_j) would overflow where g is strong.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opsbyte.attention._recurrence import (
    after,
    before,
    between,
    check_form,
    check_log_decay,
    check_recurrent,
    finite,
    first_state,
    per_head,
    segments,
)


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    form: str = "chunkwise",
    chunk: int = 32,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal linear attention with decay; no feature map, scale or divisor.

    q `(B, Hq, T, K)`, k `(B, Hkv, T, K)`, v `(B, Hkv, T, V)`; returns
    `(B, Hq, T, V)` in q's dtype. Query head h reads key head h // (Hq/Hkv).

    log_decay: g, at most 0 (−inf forgets everything): `(B, Hq, T)`, one for the
        head, or `(B, Hq, T, K)`, one for each key channel.
    form: "recurrent", "parallel" or "chunkwise", all the same function.
    initial_state, and the one returned with return_state: `(B, Hq, K, V)`, one
        for each query head since each has its decay; float32 (float64 for it).

    What is not finite at a step changes no answer before it.
    Raises ValueError on shapes, dtypes, devices or names that do not fit.
    """
    check_recurrent(q, k, v)
    chunk = check_form(form, ("recurrent", "parallel", "chunkwise"), chunk, q.shape[2])
    g = check_log_decay(log_decay, q, k).flatten(0, 1)     # (N, T, 1 or K)
    B, H, T, K = q.shape
    state = first_state(initial_state, (B, H, K, v.shape[3]), q).flatten(0, 1)
    args = *per_head(q, k, v), g, state                    # (N, T, K or V)
    if form == "recurrent":
        out, state = _recurrent(*args)
    else:  # the parallel form is one chunk
        out, state = _chunkwise(*args, chunk)
        if not finite(out):
            out, state = _recurrent(*args)
    out = out.unflatten(0, (B, H)).to(q.dtype)
    return (out, state.unflatten(0, (B, H))) if return_state else out


def _recurrent(q, k, v, g, S: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, step by step: fade, write, read."""
    outs = [v[:, :0]]
    steps = (x.unsqueeze(2).unbind(1) for x in (q, k, v, g))
    for q, k, v, g in zip(*steps, strict=True):     # (N, 1, dim)
        S = g.exp().mT * S + k.mT * v               # (N, K, V)
        outs.append(q @ S)                          # (N, 1, V)
    return torch.cat(outs, 1), S


def _chunkwise(q, k, v, g, S: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Decayed weights within a chunk, the state for all the chunks before."""
    N, T, V = v.shape
    out = v.new_empty(N, -(-T // chunk), chunk, V)
    for span, (q, k, v, g) in segments(chunk, q, k, v, g):  # (chunks, N, C, dim)
        since = before(g).exp()
        read, write = q * since, (k * after(g).exp()).mT
        fade = since[..., -1:, :].mT                # (chunks, N, 1 or K, 1)
        answers = decayed_scores((q,), k, g)[0] @ v
        tiles = (x.unbind() for x in (read, write, v, fade))
        for c, (read, write, v, fade) in enumerate(zip(*tiles, strict=True)):
            answers[c].baddbmm_(read, S)
            S = (fade * S).baddbmm_(write, v)
        out[:, span] = answers.movedim(0, 1)
    return out.flatten(1, 2)[:, :T], S


def decayed_scores(rows: tuple, k: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """For each q of rows, lower triangular `(…, C, C)`:
    Σ_c q_ic k_jc exp(g_{j+1,c} + … + g_ic).

    q and k `(…, C, K)`; g `(…, C, 1)` or `(…, C, K)`.
    """
    if g.shape[-1] > 1:
        return _scores_by_halving(torch.stack(rows), k, g).unbind()
    decay = between(g).exp().tril()
    return tuple((q @ k.mT).mul_(decay) for q in rows)


def _scores_by_halving(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """`decayed_scores` with a decay per channel, in matrix products only.

    A channel's decay cannot leave the sum over channels. But it factors at any
    point between j and i, into two decays at most 1. So cut the chunk in halves:
    pairs across the cut meet there, pairs within a half at a later, finer cut.
    """
    C = q.shape[-2]
    size = 1 << (C - 1).bit_length()                # the next power of two
    q, k, g = (F.pad(x, (0, 0, 0, size - C)) for x in (q, k, g))
    scores = torch.diag_embed((q * k).sum(-1))      # no decay from i to i
    while size > 1:
        size //= 2
        Q, K, G = (x.unflatten(-2, (-1, 2, size)) for x in (q, k, g))
        right = Q[..., 1, :, :] * before(G[..., 1, :, :]).exp()
        left = K[..., 0, :, :] * after(G[..., 0, :, :]).exp()
        cuts = scores.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
        cuts = cuts[..., :, 1, :, :, 0, :].diagonal(0, -4, -2)
        cuts.copy_((right @ left.mT).movedim(-3, -1))
    return scores[..., :C, :C]
