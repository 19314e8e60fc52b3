"""The Mamba-2 block: SSD with heads, one projection, and a normalised gate.

    z, xBC, dt = in_proj(input)              all from the input, side by side
    x, B, C = silu(causal_conv(xBC))         the convolution covers B and C too
    y = ssd(x, softplus(dt + dt_bias), A, B, C, D)
    output = out_proj(RMSNorm(y * silu(z)))

Dao and Gu 2024, arXiv 2405.21060, section 7 and figure 6; names and initial values as
in the released code. One set of weights serves prefill (`forward`) and decoding
(`step`).
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opsbyte.ssm._check import accumulator, check, check_count
from opsbyte.ssm.conv import causal_conv
from opsbyte.ssm.mamba import (
    SSMState,
    decay_rates,
    inverse_softplus,
    log_uniform,
    uniform,
)
from opsbyte.ssm.ssd import ssd


class Mamba2Block(nn.Module):
    """Mamba-2, from and to `(batch, time, d_model)`.

    d_state: N. head_dim: P, a divisor of expand d_model. groups: G, how many
    different B and C the heads share. d_conv: kernel of the convolution. eps: of
    the norm, which covers the channels of one group at a time.
    Raises ValueError on sizes that do not fit and on inputs that do not.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        head_dim: int = 64,
        groups: int = 1,
        d_conv: int = 4,
        expand: int = 2,
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        sizes = dict(d_model=d_model, d_state=d_state, head_dim=head_dim,
                     groups=groups, d_conv=d_conv, expand=expand)
        for name, value in sizes.items():
            check_count(name, value)
        D = expand * d_model
        heads, rest = divmod(D, head_dim)
        if rest:
            raise ValueError(f"head_dim: got {head_dim}, want a divisor of {D}")
        if heads % groups:
            raise ValueError(f"groups: got {groups}, want a divisor of {heads} heads")
        self.sizes = (heads, head_dim, groups, d_state, d_conv)
        self.eps = eps
        channels = D + 2 * groups * d_state                    # x, B and C
        self.in_proj = nn.Linear(d_model, D + channels + heads, bias=False)
        self.conv_weight = nn.Parameter(uniform(channels, d_conv, fan_in=d_conv))
        self.conv_bias = nn.Parameter(uniform(channels, fan_in=d_conv))
        self.dt_bias = nn.Parameter(inverse_softplus(log_uniform(heads, *dt_range)))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm_weight = nn.Parameter(torch.ones(D))
        self.out_proj = nn.Linear(D, d_model, bias=False)

    def initial_state(self, batch: int) -> SSMState:
        """The state before the first token: zeros."""
        H, P, _, N, K = self.sizes
        zeros = self.conv_weight.new_zeros
        conv = zeros(batch, self.conv_weight.shape[0], K - 1)
        return SSMState(conv, zeros(batch, H, P, N, dtype=accumulator(self.A_log)))

    def forward(
        self,
        x: Tensor,
        state: SSMState | None = None,
        *,
        return_state: bool = False,
        form: str = "chunked",
        chunk: int = 64,
    ) -> Tensor | tuple[Tensor, SSMState]:
        """x `(batch, L, d_model)` to the same shape, and the state after it."""
        check("x", x, ("batch", "L", self.in_proj.in_features), self.A_log)
        state = self.initial_state(len(x)) if state is None else state
        z, xBC, dt = self._split(self.in_proj(x))
        xBC, conv = causal_conv(xBC.mT, self.conv_weight, self.conv_bias,
                                initial_state=state.conv, return_state=True)
        x, B, C = self._heads(F.silu(xBC.mT))  # (batch, L, H, P), 2 × (batch, L, G, N)
        y, ssm = ssd(
            x, F.softplus(dt + self.dt_bias), decay_rates(self), B, C, self.D,
            initial_state=state.ssm, return_state=True, form=form, chunk=chunk,
        )
        y = self._gate_and_project(y.flatten(-2), z)
        return (y, SSMState(conv, ssm)) if return_state else y

    def step(self, x: Tensor, state: SSMState) -> tuple[Tensor, SSMState]:
        """One token: x `(batch, d_model)` to the same shape, and the next state."""
        check("x", x, ("batch", self.in_proj.in_features), self.A_log)
        z, xBC, dt = self._split(self.in_proj(x))
        window = torch.cat([state.conv, xBC[..., None]], -1)   # (batch, channels, K)
        xBC = (window * self.conv_weight).sum(-1) + self.conv_bias
        x, B, C = self._heads(F.silu(xBC))           # (batch, H, P), 2 × (batch, G, N)
        # The recurrence itself runs in the state's precision, float32 or more.
        x_, B, C, dt = (t.to(state.ssm.dtype) for t in (x, B, C, dt + self.dt_bias))
        repeat = x.shape[1] // B.shape[1]
        B, C = (t.repeat_interleave(repeat, 1) for t in (B, C))       # (batch, H, N)
        dt = F.softplus(dt)[..., None, None]                          # (batch, H, 1, 1)
        decay = torch.exp(dt * decay_rates(self)[:, None, None])
        S = decay * state.ssm + dt * x_[..., None] * B[:, :, None]    # (batch, H, P, N)
        y = (S @ C[..., None])[..., 0] + self.D[:, None] * x_         # (batch, H, P)
        y = self._gate_and_project(y.flatten(-2).to(x.dtype), z)
        return y, SSMState(window[..., 1:], S)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z `(…, D)`, xBC `(…, D + 2 G N)`, dt `(…, H)`."""
        D, channels, H = len(self.norm_weight), len(self.conv_weight), self.sizes[0]
        return projected.split([D, channels, H], dim=-1)

    def _heads(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x `(…, H, P)`, B and C `(…, G, N)`."""
        H, P, G, N, _ = self.sizes
        x, B, C = xBC.split([H * P, G * N, G * N], dim=-1)
        return x.unflatten(-1, (H, P)), B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N))

    def _gate_and_project(self, y: Tensor, z: Tensor) -> Tensor:
        """Gate, then RMSNorm within each group in float32, then back to d_model."""
        dtype, groups = accumulator(y), self.sizes[2]
        gated = (y.to(dtype) * F.silu(z.to(dtype))).unflatten(-1, (groups, -1))
        normed = F.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(-2)
        return self.out_proj(normed.to(y.dtype) * self.norm_weight)
