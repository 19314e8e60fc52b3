"""The Mamba block: a selective scan between two projections, with a gate.

    x, z = in_proj(input)                    d_model -> 2 D,  D = expand d_model
    x = silu(causal_conv(x))
    delta, B, C = x_proj(x)                  the selection: all three from the token
    y = selective_scan(x, softplus(dt_proj(delta)), A, B, C, D) * silu(z)
    output = out_proj(y)                     D -> d_model

Gu and Dao 2023, arXiv 2312.00752, section 3.4 and figure 3; names and initial values
as in the released code. One set of weights serves prefill (`forward`, a whole
sequence) and decoding (`step`, one token from a state of fixed size).
"""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opsbyte.ssm._check import accumulator, check, check_count
from opsbyte.ssm.conv import causal_conv
from opsbyte.ssm.scan import selective_scan


class SSMState(NamedTuple):
    """What a block remembers: its size does not depend on the tokens seen."""

    conv: Tensor  # the last inputs of the convolution, (batch, channels, K - 1)
    ssm: Tensor   # float32; Mamba (batch, D, N), Mamba-2 (batch, H, P, N)


class MambaBlock(nn.Module):
    """Mamba-1, from and to `(batch, time, d_model)`.

    d_state: N, the state per channel. d_conv: K, the kernel of the convolution.
    expand: D / d_model. dt_rank: rank of the projection to delta, by default
    d_model / 16 rounded up. dt_range: where softplus(dt_proj.bias) starts out.
    Raises ValueError on sizes below 1 and on inputs that do not fit.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        dt_range: tuple[float, float] = (1e-3, 1e-1),
    ) -> None:
        super().__init__()
        dt_rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        sizes = dict(d_model=d_model, d_state=d_state, d_conv=d_conv,
                     expand=expand, dt_rank=dt_rank)
        for name, value in sizes.items():
            check_count(name, value)
        D = expand * d_model
        self.sizes = (D, d_state, d_conv, dt_rank)
        self.in_proj = nn.Linear(d_model, 2 * D, bias=False)
        self.conv_weight = nn.Parameter(uniform(D, d_conv, fan_in=d_conv))
        self.conv_bias = nn.Parameter(uniform(D, fan_in=d_conv))
        self.x_proj = nn.Linear(D, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, D)
        nn.init.uniform_(self.dt_proj.weight, -(dt_rank**-0.5), dt_rank**-0.5)
        self.dt_proj.bias = nn.Parameter(inverse_softplus(log_uniform(D, *dt_range)))
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(D, 1))
        self.D = nn.Parameter(torch.ones(D))
        self.out_proj = nn.Linear(D, d_model, bias=False)

    def initial_state(self, batch: int) -> SSMState:
        """The state before the first token: zeros."""
        D, N, K, _ = self.sizes
        zeros, dtype = self.conv_weight.new_zeros, accumulator(self.A_log)
        return SSMState(zeros(batch, D, K - 1), zeros(batch, D, N, dtype=dtype))

    def forward(
        self,
        x: Tensor,
        state: SSMState | None = None,
        *,
        return_state: bool = False,
        form: str = "chunked",
    ) -> Tensor | tuple[Tensor, SSMState]:
        """x `(batch, L, d_model)` to the same shape, and the state after it."""
        check("x", x, ("batch", "L", self.in_proj.in_features), self.A_log)
        state = self.initial_state(len(x)) if state is None else state
        _, N, _, dt_rank = self.sizes
        x, z = self.in_proj(x).mT.chunk(2, dim=1)             # (batch, D, L) each
        x, conv = causal_conv(x, self.conv_weight, self.conv_bias,
                              initial_state=state.conv, return_state=True)
        x = F.silu(x)
        delta, B, C = self.x_proj(x.mT).split([dt_rank, N, N], dim=-1)
        delta = F.linear(delta, self.dt_proj.weight)          # (batch, L, D)
        y, ssm = selective_scan(
            x, delta.mT, decay_rates(self), B.mT, C.mT, self.D, z, self.dt_proj.bias,
            delta_softplus=True, initial_state=state.ssm, return_state=True, form=form,
        )
        y = self.out_proj(y.mT)                               # (batch, L, d_model)
        return (y, SSMState(conv, ssm)) if return_state else y

    def step(self, x: Tensor, state: SSMState) -> tuple[Tensor, SSMState]:
        """One token: x `(batch, d_model)` to the same shape, and the next state."""
        check("x", x, ("batch", self.in_proj.in_features), self.A_log)
        _, N, _, dt_rank = self.sizes
        x, z = self.in_proj(x).chunk(2, dim=-1)                       # (batch, D) each
        window = torch.cat([state.conv, x[..., None]], -1)            # (batch, D, K)
        x = F.silu((window * self.conv_weight).sum(-1) + self.conv_bias)
        delta, B, C = self.x_proj(x).split([dt_rank, N, N], dim=-1)
        # The recurrence itself runs in the state's precision, float32 or more.
        dtype, delta = state.ssm.dtype, self.dt_proj(delta)
        x_, delta, B, C = (t.to(dtype) for t in (x, delta, B, C))
        delta = F.softplus(delta)[..., None]                          # (batch, D, 1)
        decay = torch.exp(delta * decay_rates(self))                  # (batch, D, N)
        h = decay * state.ssm + delta * x_[..., None] * B[:, None]    # (batch, D, N)
        y = (h @ C[..., None])[..., 0] + self.D * x_                  # (batch, D)
        y = self.out_proj((y * F.silu(z)).to(x.dtype))                # (batch, d_model)
        return y, SSMState(window[..., 1:], h)


def decay_rates(block: nn.Module) -> Tensor:
    """A = -exp(A_log) < 0, float32 even where the weights are half precision."""
    return -block.A_log.to(accumulator(block.A_log)).exp()


def uniform(*shape: int, fan_in: int) -> Tensor:
    """torch's default initial values of a layer with `fan_in` inputs."""
    return torch.empty(shape).uniform_(-1, 1) / math.sqrt(fan_in)


def log_uniform(n: int, low: float, high: float) -> Tensor:
    """n samples whose logarithm is uniform between those of low and high."""
    return torch.exp(torch.empty(n).uniform_(math.log(low), math.log(high)))


def inverse_softplus(x: Tensor) -> Tensor:
    """The y with softplus(y) = x > 0."""
    return x + torch.log(-torch.expm1(-x))
