"""Softmax attention behind a sigmoid gate.

Qiu et al. 2025, arXiv 2505.06708 (gate after the attention, "G1"; Qwen3-Next).

    out = σ(gate) ⊙ softmax(q kᵀ / √D) v

Called gated attention too, but nothing here decays and no state replaces the
cache: the softmax stays. Its weights must sum to 1, so a head with nothing to
say has to look somewhere (a sink); the gate, computed from the query's own
input, lets it be silent instead.
"""
from __future__ import annotations

import torch
from torch import Tensor

from opsbyte.attention._recurrence import check_gate
from opsbyte.attention.dense import accumulator, attention


def output_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
) -> Tensor:
    """`attention`, times the sigmoid of `gate`, in q's dtype.

    gate: before the sigmoid; `(B, Hq, Tq)`, one for the head, or
        `(B, Hq, Tq, Dv)`, one for each element.
    The other arguments, the result and the errors as
    `opsbyte.attention.attention`.
    """
    out = attention(q, k, v, causal=causal, window=window, sinks=sinks, scale=scale)
    check_gate("gate", gate, q, (tuple(out.shape[:3]), tuple(out.shape)))
    if gate.dim() == 3:
        gate = gate.unsqueeze(-1)
    return (accumulator(out) * torch.sigmoid(accumulator(gate))).to(q.dtype)
