"""State space duality (SSD), the heart of Mamba-2, in three forms with one result.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_tᵀ             (state, per head: P × N)
    y_t = S_t C_t + D x_t                                 (output, per head: P)

Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060, sections 3, 5 and 6.
Against Mamba-1 the decay is one number per head and step. So a whole head shares
its decays, and unrolling the recurrence gives attention with a decay for a mask:

    y = (L ∘ C Bᵀ) (dt x),   L[t, s] = exp(dt_{s+1} A + … + dt_t A) for s <= t

C is the query, B the key, dt x the value: gated linear attention without a scale.

- recurrent: one step after the other, O(L) work, matrix-vector products;
- quadratic: the masked attention above, O(L²) work, matrix products;
- chunked: quadratic inside chunks, recurrent between them: O(L) work in matrix
  products, which is what hardware is fast at.
"""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from opsbyte.ssm._check import (
    accumulator,
    check,
    check_choice,
    check_count,
    needs_grad,
)

FORMS = ("recurrent", "quadratic", "chunked")
LOG2_E = math.log2(math.e)  # exp(x) = 2^(x log2 e); torch's exp2 beats its exp on CPUs
MASKS = 2**18               # elements of decay masks held at once: 1 MiB of float32


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    form: str = "chunked",
    chunk: int = 64,
) -> Tensor | tuple[Tensor, Tensor]:
    """y of every time step `(batch, L, H, P)`, and the last state if asked.

    x `(batch, L, H, P)`; dt `(batch, L, H)`, positive; A `(H,)`, negative in a
    stable model; B, C `(batch, L, G, N)`, where group g serves the heads
    g H/G to (g+1) H/G - 1; D `(H,)`; states `(batch, H, P, N)`.

    form: "recurrent", "quadratic" or "chunked".
    chunk: time steps in a chunk of "chunked"; any L is accepted.

    Half precision is computed and carried in float32, and sums of log decays in
    float64: strong decays must not blur the weak ones after them. Returns y in x's
    dtype, and the state in float32 (float64 for float64). Raises ValueError on
    shapes, dtypes, devices or options that do not fit.
    """
    check("x", x, ("batch", "L", "H", "P"))
    batch, length, heads, P = x.shape
    check("dt", dt, (batch, length, heads), x)
    check("A", A, (heads,), x)
    check("B", B, (batch, length, "G", "N"), x)
    groups, N = B.shape[2:]
    if groups == 0 or heads % groups:
        raise ValueError(f"B: got {groups} groups, want a divisor of {heads} heads")
    check("C", C, (batch, length, groups, N), x)
    check("D", D, (heads,), x)
    check("initial_state", initial_state, (batch, heads, P, N), x)
    check_choice("form", form, FORMS)
    check_count("chunk", chunk)

    dtype = accumulator(x)
    log_decay = dt.double() * A.double() * LOG2_E                # base 2, (batch, L, H)
    log_decay = log_decay.clamp(min=-1100)        # where even float64's 2^x is zero
    args = [t.to(dtype) for t in (x, dt, B, C)]
    if initial_state is None:
        state = args[0].new_zeros(batch, heads, P, N)
    else:
        state = initial_state.to(dtype)

    if length == 0:
        y = args[0]
    elif form == "recurrent":
        y, state = _recurrent(*args, log_decay, state)
    elif form == "quadratic":
        y, state = _chunks(*args, log_decay, state, length)
    else:
        y, state = _chunked(*args, log_decay, state, chunk)
    if D is not None:
        y = torch.addcmul(y, D.to(dtype)[:, None], args[0])
    y = y.to(x.dtype)
    return (y, state) if return_state else y


def _recurrent(x, dt, B, C, log_decay, state):
    """The definition: L steps, each needs the one before."""
    repeat = x.shape[2] // B.shape[2]
    decay = torch.exp2(log_decay).to(x.dtype)[..., None, None]
    ys = []
    for t in range(x.shape[1]):
        b = B[:, t].repeat_interleave(repeat, 1)                 # (batch, H, N)
        c = C[:, t].repeat_interleave(repeat, 1)
        value = dt[:, t, :, None] * x[:, t]                      # (batch, H, P)
        write = value[..., None] * b[:, :, None]                 # (batch, H, P, N)
        state = decay[:, t] * state + write
        ys.append((state * c[:, :, None]).sum(-1))               # (batch, H, P)
    return torch.stack(ys, 1), state


def _chunked(x, dt, B, C, log_decay, state, Q):
    """Chunks of Q steps, as many at once as keep their masks in cache."""
    batch, length, heads, _ = x.shape
    parts, span = (x, dt, B, C, log_decay), Q * max(1, MASKS // (batch * heads * Q * Q))
    grad = needs_grad(*parts, state)
    ys, y = [], None if grad else torch.empty_like(x)
    for start in range(0, length, span):
        now = [p[:, start : start + span] for p in parts]
        steps = now[0].shape[1]
        if steps % Q:  # fill the last chunk with steps that neither write nor decay
            now = [F.pad(p, (0, 0) * (p.dim() - 2) + (0, -steps % Q)) for p in now]
        out, state = _chunks(*now, state, Q)
        if grad:
            ys.append(out[:, :steps])
        else:
            y[:, start : start + steps] = out[:, :steps]
    return torch.cat(ys, 1) if grad else y, state


def _chunks(x, dt, B, C, log_decay, state, Q):
    """All chunks of Q steps at once, L a multiple of Q. With Q = L: one attention.

    Shapes: c chunks, G groups of R heads, H = G R. The heads of a group share B and
    C, so their columns are put side by side in one product, R P wide.
    """
    batch, length, H, P = x.shape
    G, N = B.shape[2:]
    c, R, dtype = length // Q, H // G, x.dtype
    value = (x * dt[..., None]).reshape(batch, c, Q, H, P)
    B = B.reshape(batch, c, Q, G, N).transpose(2, 3)             # (batch, c, G, Q, N)
    C = C.reshape(batch, c, Q, G, N).transpose(2, 3)
    sums = log_decay.reshape(batch, c, Q, H).cumsum(2)           # since the chunk began

    # 1. Inside a chunk: attention with decays for a mask.
    scores = (C @ B.mT)[:, :, :, None]                    # (batch, c, G, 1, Q, Q)
    mask = decay_mask(sums.mT.contiguous(), dtype).reshape(batch, c, G, R, Q, Q)
    weights = (mask * scores).reshape(batch, c, H, Q, Q)
    inside = (weights @ value.transpose(2, 3)).transpose(2, 3)   # (batch, c, Q, H, P)

    # 2. What each chunk alone leaves in the state at its end.
    to_end = torch.exp2(sums[:, :, -1:] - sums).to(dtype)[..., None]
    kept = (value * to_end).reshape(batch, c, Q, G, R * P).transpose(2, 3)
    left = B.mT @ kept                                           # (batch, c, G, N, R P)

    # 3. Between chunks: the recurrence, one step a chunk.
    from_start = torch.exp2(sums).to(dtype)                      # (batch, c, Q, H)
    decay = from_start[:, :, -1].repeat_interleave(P, -1).reshape(batch, c, G, 1, R * P)
    h = state.reshape(batch, G, R * P, N).mT                     # (batch, G, N, R P)
    entering = []
    for i in range(c):
        entering.append(h)
        h = torch.addcmul(left[:, i], decay[:, i], h)

    # 4. What the state at a chunk's start gives to its steps.
    carried = (C @ torch.stack(entering, 1)).transpose(2, 3)     # (batch, c, Q, G, R P)
    carried = carried.reshape(batch, c, Q, H, P)
    y = torch.addcmul(inside, carried, from_start[..., None])
    return y.reshape(batch, length, H, P), h.mT.reshape(batch, H, P, N)


def decay_mask(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """L[t, s] = 2^(sums_t - sums_s) for s <= t, else 0, `(…, Q, Q)` from `(…, Q)`.

    The exponent is masked, not the power: above the diagonal it may overflow.
    """
    Q = sums.shape[-1]
    future = torch.full((Q, Q), -torch.inf, dtype=dtype, device=sums.device).triu(1)
    return torch.exp2((sums[..., :, None] - sums[..., None, :]).to(dtype) + future)
