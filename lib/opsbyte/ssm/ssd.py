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
from torch import Tensor

from opsbyte.attention.dense import wide
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
    chunk: time steps in a chunk of "chunked"; any L is accepted. Each head's mask has
    chunk² elements: it pays as long as they stay in cache (32 to 128 on CPUs).

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
    rate = wide(A.to(dtype)) * LOG2_E                            # base 2, as exp2 is
    log_decay = wide(dt.to(dtype)) * rate                        # (batch, L, H)
    log_decay = log_decay.clamp(min=-1100)        # where even float64's 2^x is zero
    args = [t.to(dtype) for t in (x, dt, B, C)]
    if initial_state is None:
        state = args[0].new_zeros(batch, heads, P, N)
    else:
        state = initial_state.to(dtype)

    if x.numel() == 0:
        y = args[0]
    elif form == "recurrent":
        y, state = _recurrent(*args, log_decay, state)
    else:
        chunk = length if form == "quadratic" else chunk
        y, end = _chunked(*args, log_decay, state, chunk)
        if not end.isfinite().all():  # masked or not, 0 · NaN = NaN: earlier steps too
            y, end = _recurrent(*args, log_decay, state)
        state = end
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
    """Whole chunks of Q steps, then what is left over as one shorter chunk."""
    parts, length = (x, dt, B, C, log_decay), x.shape[1]
    y = None if needs_grad(*parts, state) else torch.empty_like(x)
    whole, ys = length - length % Q, []
    for start, stop, steps in ((0, whole, Q), (whole, length, length - whole)):
        if start < stop:
            now = [p[:, start:stop] for p in parts]
            out = None if y is None else y[:, start:stop]
            out, state = _chunks(*now, state, steps, out)
            ys.append(out)
    return torch.cat(ys, 1) if y is None else y, state


def _chunks(x, dt, B, C, log_decay, state, Q, out):
    """Chunks of Q steps, L a multiple of Q, as many at once as stay in cache.

    Shapes: c chunks, G groups of R heads, H = G R. Without `out`, a place for y,
    autograd may follow.
    """
    batch, length, H, P = x.shape
    G, N = B.shape[2:]

    def cut(t, *heads):
        """`(batch, L, H or G, …)` to `(c, batch, G[, R], Q, …)`, a view."""
        t = t.reshape(batch, length // Q, Q, *heads, *t.shape[3:])
        return t.movedim(2, 2 + len(heads)).transpose(0, 1)

    heads = G, H // G
    dt, sums = cut(dt, *heads), cut(log_decay, *heads).cumsum(-1)  # from chunk's start
    from_start = torch.exp2(sums).to(x.dtype)
    to_end = torch.exp2(sums[..., -1:] - sums).to(x.dtype) * dt
    parts = cut(x, *heads), dt, cut(B, G), cut(C, G), sums, from_start, to_end
    out = None if out is None else cut(out, *heads)
    h = state.reshape(batch, G, -1, N).mT                        # (batch, G, N, R P)
    span, ys = max(1, MASKS // (batch * H * Q * Q)), []
    for i in range(0, length // Q, span):
        now = [p[i : i + span] for p in parts]
        y, h = _span(*now, h, None if out is None else out[i : i + span])
        ys.append(y)
    y = torch.cat(ys) if out is None else out
    y = y.transpose(0, 1).movedim(4, 2).reshape(batch, length, H, P)
    return y, h.mT.reshape(batch, H, P, N)


def _span(x, dt, B, C, sums, from_start, to_end, h, out):
    """Some chunks at once. With one: attention, and a state before and after.

    x, y `(c, batch, G, R, Q, P)`; B, C `(c, batch, G, Q, N)`; dt and the decays
    `(c, batch, G, R, Q)`. The heads of a group share B and C, so their columns are
    put side by side in one product, R P wide; there are n = c batch G products.
    """
    c, batch, G, R, Q, P = x.shape
    grad, N = out is None, B.shape[-1]
    B, C = B.reshape(-1, Q, N), C.reshape(-1, Q, N)              # (n, Q, N)

    # 1. Inside a chunk: attention with decays for a mask.
    scores = torch.bmm(C, B.mT)[:, None]                         # (n, 1, Q, Q)
    weights = decay_mask(sums, x.dtype).reshape(-1, R, Q, Q) * scores
    value = None if grad else x.new_empty(x.shape)
    value = torch.mul(x, dt[..., None], out=value)
    inside = torch.bmm(weights.reshape(-1, Q, Q), value.reshape(-1, Q, P))

    # 2. What each chunk alone leaves in the state at its end.
    kept = None if grad else x.new_empty(c, batch, G, Q, R, P).transpose(3, 4)
    kept = torch.mul(x, to_end[..., None], out=kept)
    kept = kept.transpose(3, 4).reshape(-1, Q, R * P)
    states = x.new_empty(c + 1, batch, G, N, R * P)
    left = torch.bmm(B.mT, kept, out=None if grad else states[1:].flatten(0, 2))

    # 3. Between chunks: the recurrence, one step a chunk.
    decay = from_start[..., -1].repeat_interleave(P, -1)[..., None, :]
    entering = [states[0].copy_(h)]
    for d, s in zip(decay, left.view(states[1:].shape), strict=True):
        entering.append(torch.addcmul(s, d, entering[-1], out=None if grad else s))
    *entering, h = entering
    entering = torch.stack(entering) if grad else states[:-1]

    # 4. What the state at a chunk's start gives to its steps.
    carried = torch.bmm(C, entering.view(-1, N, R * P))
    carried = carried.view(c, batch, G, Q, R, P).transpose(3, 4)
    y = torch.addcmul(inside.view(x.shape), carried, from_start[..., None], out=out)
    return y, h


def decay_mask(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """L[t, s] = 2^(sums_t - sums_s) for s <= t, else 0, `(…, Q, Q)` from `(…, Q)`.

    The exponent is masked, not the power: above the diagonal it may overflow. It is
    as exact as a difference in sums' dtype, but made of two parts in `dtype`.
    """
    Q, high = sums.shape[-1], sums.to(dtype)
    low = (sums - high).to(dtype)
    future = torch.full((Q, Q), -torch.inf, dtype=dtype, device=sums.device).triu(1)
    between = high[..., :, None] - high[..., None, :]
    between.add_(low[..., :, None]).sub_(low[..., None, :]).add_(future)
    return between.exp2_()
