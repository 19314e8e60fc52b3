"""The (gated) delta rule: write what the state does not know yet.

Delta rule, Yang et al. 2024, arXiv 2406.06484; gated, arXiv 2412.06464 (used by
Qwen3-Next); with a decay per channel, Kimi Linear's, arXiv 2510.26692.

    S_t = A_t + k_t u_tᵀ,   u_t = β_t (v_t − A_tᵀ k_t),   A_t = diag(exp(g_t)) S_{t-1}

Linear attention only ever adds. Here a step reads what the key recalls, and
writes the difference to its value. So u_t needs the u before it: within a chunk
a triangular system, (I + L) u = β (v − k S). L is made of keys, β and decays, so all
chunks are inverted at once, before any state S is known.
"""
from __future__ import annotations

import torch
from torch import Tensor

from opsbyte.attention._recurrence import (
    after,
    before,
    check_form,
    check_gate,
    check_log_decay,
    check_recurrent,
    finite,
    first_state,
    per_head,
    segments,
)
from opsbyte.attention.dense import accumulator
from opsbyte.attention.gated import decayed_scores


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    form: str = "chunkwise",
    chunk: int = 32,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule, without a scale; log_decay None is the plain rule.

    q `(B, Hq, T, K)`, k `(B, Hkv, T, K)`, v `(B, Hkv, T, V)`; returns
    `(B, Hq, T, V)` in q's dtype. Query head h reads key head h // (Hq/Hkv).
    The caller normalises the keys: with |k| = 1 and 0 <= β <= 2 no eigenvalue
    of I − β k kᵀ exceeds 1 in size; otherwise the state may grow without bound.

    beta: how much of the difference is written, `(B, Hq, T)`.
    log_decay: at most 0 (−inf forgets everything): `(B, Hq, T)`, one for the
        head, or `(B, Hq, T, K)`, one for each key channel.
    form: "recurrent" or "chunkwise", the same function.
    initial_state, and the one returned with return_state: `(B, Hq, K, V)`, one
        for each query head since each has its β; float32 (float64 for it).

    What is not finite at a step changes no answer before it.
    Raises ValueError on shapes, dtypes, devices or names that do not fit.
    """
    check_recurrent(q, k, v)
    chunk = check_form(form, ("recurrent", "chunkwise"), chunk, q.shape[2])
    B, H, T, K = q.shape
    check_gate("beta", beta, q, ((B, H, T),))
    if log_decay is None:
        log_decay = torch.zeros_like(beta)
    g = check_log_decay(log_decay, q, k).flatten(0, 1)     # (N, T, 1 or K)
    state = first_state(initial_state, (B, H, K, v.shape[3]), q).flatten(0, 1)
    dtype = q.dtype
    beta = beta.to(accumulator(q).dtype).flatten(0, 1).unsqueeze(-1)
    args = *per_head(q, k, v), beta, g, state
    if form == "recurrent":
        out, state = _recurrent(*args)
    else:
        out, state = _chunkwise(*args, chunk)
        if not finite(out):
            out, state = _recurrent(*args)
    out = out.unflatten(0, (B, H)).to(dtype)
    return (out, state.unflatten(0, (B, H))) if return_state else out


def _recurrent(q, k, v, beta, g, S: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, step by step: fade, recall, write the difference, read."""
    outs = [v[:, :0]]
    steps = (x.unsqueeze(2).unbind(1) for x in (q, k, v, beta, g))
    for q, k, v, beta, g in zip(*steps, strict=True):  # (N, 1, dim)
        S = g.exp().mT * S                          # (N, K, V)
        u = beta * (v - k @ S)                      # (N, 1, V)
        S = S + k.mT * u
        outs.append(q @ S)
    return torch.cat(outs, 1), S


def _chunkwise(q, k, v, beta, g, S: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """As gated linear attention, of u instead of v, once the state gives u."""
    N, T, V = v.shape
    out = v.new_empty(N, -(-T // chunk), chunk, V)
    for span, (q, k, v, beta, g) in segments(chunk, q, k, v, beta, g):
        since = before(g).exp()                     # (chunks, N, C, 1 or K)
        read, recall, write = q * since, k * since, (k * after(g).exp()).mT
        fade = since[..., -1:, :].mT                # (chunks, N, 1 or K, 1)
        scores, overlap = decayed_scores((q, k), k, g)
        solve = _inverse(beta * overlap) * beta.mT  # (chunks, N, C, C)
        answers = torch.empty_like(v)
        tiles = (x.unbind() for x in (scores, read, recall, solve, v, write, fade))
        for c, tile in enumerate(zip(*tiles, strict=True)):
            scores, read, recall, solve, v, write, fade = tile
            u = solve @ torch.baddbmm(v, recall, S, alpha=-1)   # (N, C, V)
            answers[c].baddbmm_(read, S, beta=0).baddbmm_(scores, u)
            S = (fade * S).baddbmm_(write, u)
        out[:, span] = answers.movedim(0, 1)
    return out.flatten(1, 2)[:, :T], S


def _inverse(L: Tensor) -> Tensor:
    """(I + L)⁻¹, reading L's strictly lower triangle only: the UT transform."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    # From the right: from the left, β near 2 and like keys cost the solver digits.
    return torch.linalg.solve_triangular(
        L, eye, upper=False, left=False, unitriangular=True
    )
