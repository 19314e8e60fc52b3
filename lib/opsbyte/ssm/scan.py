"""The selective scan of Mamba, in three forms with one result.

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t        (state, per channel: N)
    y_t = C_t h_t + D u_t                                 (output, per channel)

Gu and Dao 2023, "Mamba", arXiv 2312.00752, equations 2 to 4 and algorithm 2.
delta, B and C depend on the token: that is the selection. A time-invariant model
keeps them fixed, and could be computed as one long convolution instead.

Discretisation: exp(delta A) is the zero-order hold of A. The paper's equation 4
gives B the zero-order hold too, (exp(delta A) - 1) / A. The released code, and so
this file, uses its first-order term delta B (Euler); they agree as delta A -> 0.

- sequential: one time step after the other, the definition;
- parallel: the steps h -> a h + b compose associatively, so pairs can be merged
  in a tree, O(L) work in about 2 log2 L sweeps (Blelloch 1990, "Prefix sums and
  their applications"). All L states lie in memory at once;
- chunked: over stretches of time short enough to stay in cache. What does not
  depend on the state (exponentials, outer products, the sum over N) is done for a
  stretch at once. The rest is a plain loop if a step keeps all cores busy, and
  otherwise the tree, with a plain loop at its top.
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

FORMS = ("sequential", "parallel", "chunked")
LOG2_E = math.log2(math.e)  # exp(x) = 2^(x log2 e); torch's exp2 beats its exp on CPUs
BUFFER = 2**20              # elements of a stretch: 4 MiB of float32
LEAF = 16                   # steps that the chunked form leaves to the loop
GRAIN = 2**15               # elements from which torch shares an operator out


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    form: str = "chunked",
    chunk: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y of every time step, and the last state if asked.

    u, delta, z `(batch, D, L)`; A `(D, N)`, negative in a stable model;
    B, C `(batch, N, L)`; D, delta_bias `(D,)`; states `(batch, D, N)`.

    delta gets `delta_bias` added and then softplus if `delta_softplus`.
    D adds D u, the skip; z multiplies the result by silu(z), the gate.
    form: "sequential", "parallel" or "chunked" (fastest on a CPU).
    chunk: time steps that "chunked" takes at once, by default as many as keep a
    buffer of `(chunk, batch, N, D)` within 4 MiB.

    Half precision is computed and carried in float32. Returns y in u's dtype,
    and the state in float32 (float64 for float64). Raises ValueError on shapes,
    dtypes, devices or options that do not fit.
    """
    check("u", u, ("batch", "D", "L"))
    batch, channels, length = u.shape
    check("delta", delta, (batch, channels, length), u)
    check("A", A, (channels, "N"), u)
    N = A.shape[1]
    check("B", B, (batch, N, length), u)
    check("C", C, (batch, N, length), u)
    check("D", D, (channels,), u)
    check("z", z, (batch, channels, length), u)
    check("delta_bias", delta_bias, (channels,), u)
    check("initial_state", initial_state, (batch, channels, N), u)
    check_choice("form", form, FORMS)
    if chunk is not None:
        check_count("chunk", chunk)

    dtype = accumulator(u)
    x, delta, A, B, C = (t.to(dtype) for t in (u, delta, A, B, C))
    if delta_bias is not None:
        delta = delta + delta_bias.to(dtype)[:, None]
    if delta_softplus:
        delta = F.softplus(delta)
    if initial_state is None:
        h = x.new_zeros(batch, channels, N)
    else:
        h = initial_state.to(dtype)

    if form == "sequential":
        y, h = _sequential(x, delta, A, B, C, h)
    elif form == "parallel":
        chunk = max(1, length)
        y, h = _stretches(x, delta, A, B, C, h, chunk=chunk, leaf=1)
    else:
        chunk = chunk or max(LEAF, BUFFER // max(1, h.numel()))
        # Wide steps are worth an operator each, narrow ones are merged first.
        wide = h.numel() >= (GRAIN if torch.get_num_threads() > 1 else GRAIN // 8)
        leaf = chunk if wide else LEAF
        y, h = _stretches(x, delta, A, B, C, h, chunk=chunk, leaf=leaf)

    if D is not None:
        y = y + D.to(dtype)[:, None] * x
    if z is not None:
        y = y * F.silu(z.to(dtype))
    y = y.to(u.dtype)
    return (y, h) if return_state else y


def _sequential(u, delta, A, B, C, h):
    """The definition: L steps, each needs the one before. y `(batch, D, L)`."""
    ys = []
    for t in range(u.shape[2]):
        decay = torch.exp(delta[:, :, t, None] * A)                   # (batch, D, N)
        write = (delta[:, :, t] * u[:, :, t])[..., None] * B[:, None, :, t]
        h = decay * h + write                                         # (batch, D, N)
        ys.append((h * C[:, None, :, t]).sum(-1))                     # (batch, D)
    return torch.stack(ys, -1) if ys else u.clone(), h


def _stretches(u, delta, A, B, C, h, *, chunk, leaf):
    """The scan, `chunk` steps at a time. Time comes first, channels come last."""
    batch, D, length = u.shape
    B, C = (t.permute(2, 0, 1).contiguous() for t in (B, C))          # (L, batch, N)
    A = A.T.contiguous() * LOG2_E                                     # (N, D)
    h = h.mT.contiguous()                                             # (batch, N, D)
    grad = needs_grad(u, delta, A, B, C, h)
    buffers = None, None        # autograd keeps its own; otherwise reuse two
    if not grad:
        y = u.new_empty(length, batch, 1, D)
        buffers = u.new_empty(2, min(chunk, length), *h.shape)
    ys = []
    for start in range(0, length, chunk):
        t = slice(start, start + chunk)
        steps = min(chunk, length - start)
        one, two = (None if b is None else b[:steps] for b in buffers)
        out = None if grad else y[t]
        dt, x = (_time_first(p[..., t]) for p in (delta, u))   # (chunk, batch, 1, D)
        decay = torch.mul(dt, A, out=one)                      # (chunk, batch, N, D)
        decay = torch.exp2(decay, out=one)
        write = torch.mul(dt * x, B[t, ..., None], out=two)
        states = recurrence(decay, write, h, leaf=leaf, reuse=not grad)
        h = states[-1].clone()                                 # (batch, N, D)
        ys.append(torch.matmul(C[t, :, None], states, out=out))
    if grad or not ys:
        y = torch.cat(ys) if ys else u.permute(2, 0, 1)[:, :, None]
    return y[:, :, 0].permute(1, 2, 0), h.mT


def _time_first(x: Tensor) -> Tensor:
    """`(batch, D, T)` to a contiguous `(T, batch, 1, D)`."""
    batch, D, T = x.shape
    if x.stride(2) == 1:  # torch transposes contiguous matrices faster than slices
        return x.flatten(0, 1).contiguous().T.contiguous().view(T, batch, 1, D)
    return x.permute(2, 0, 1).contiguous()[:, :, None]


def recurrence(
    a: Tensor, b: Tensor, h: Tensor, *, leaf: int = LEAF, reuse: bool = False
) -> Tensor:
    """All h_t = a_t h_{t-1} + b_t along the first dimension, from h_{-1} = h.

    a, b `(T, …)`, h `(…)`; returns `(T, …)`.
    leaf: sequences up to this length are looped over, longer ones are merged in
    pairs. reuse: write into a and b (a is spoilt, b becomes the result) where
    that is possible, that is, where no gradient is asked for.
    """
    if needs_grad(a, b, h):
        return _Recurrence.apply(a, b, h, leaf)
    if not reuse:
        a, b = a.clone(), b.clone()
    _scan_(a, b, h, leaf)
    return b


def _scan_(a: Tensor, b: Tensor, h: Tensor, leaf: int) -> None:
    """`recurrence` in place: b becomes the states, a is spoilt."""
    if len(b) <= max(leaf, 1):
        for decay, state in zip(a.unbind(), b.unbind(), strict=True):
            h = state.addcmul_(decay, h)             # b_t + a_t h_{t-1}
        return
    a_even, a_odd, b_even, b_odd = a[::2], a[1::2], b[::2], b[1::2]
    pairs = len(b_odd)
    # Two steps make one: h -> a_odd (a_even h + b_even) + b_odd.
    b_odd.addcmul_(a_odd, b_even[:pairs])
    a_odd.mul_(a_even[:pairs])
    _scan_(a_odd, b_odd, h, leaf)                    # half as long: odd states done
    b_even[0].addcmul_(a_even[0], h)
    b_even[1:].addcmul_(a_even[1:], b_odd[: len(b_even) - 1])


class _Recurrence(torch.autograd.Function):
    """The gradient of the recurrence is the same recurrence, backwards in time."""

    @staticmethod
    def forward(ctx, a, b, h, leaf):
        states = b.clone()
        _scan_(a.clone(), states, h, leaf)
        ctx.save_for_backward(a, states, h)
        ctx.leaf = leaf
        return states

    @staticmethod
    def backward(ctx, grad):
        a, states, h = ctx.saved_tensors
        # d_t = grad_t + a_{t+1} d_{t+1}
        a_next = torch.cat([a[1:], torch.zeros_like(a[:1])])
        d = recurrence(a_next.flip(0), grad.flip(0), torch.zeros_like(h), leaf=ctx.leaf)
        d = d.flip(0)
        before = torch.cat([h[None], states[:-1]])   # h_{t-1}
        return d * before, d, a[0] * d[0], None
