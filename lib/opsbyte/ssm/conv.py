"""The short causal convolution in front of the state space model.

    y_t = bias + sum_k weight_k x_{t - K + 1 + k}         (each channel on its own)

Mamba's block (arXiv 2312.00752, figure 3) mixes each channel with its K - 1 last
inputs, K = 4. Decoding needs only those: the state is `(batch, D, K - 1)`, whatever
the length so far.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opsbyte.ssm._check import check


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal depthwise convolution of x `(batch, D, L)`, same shape out.

    weight `(D, K)`, the last column meets the newest input; bias `(D,)`;
    initial_state `(batch, D, K - 1)`: the inputs before x, zeros if left out.
    With `return_state` also the last K - 1 inputs. One decoding step is L = 1.
    Raises ValueError on shapes or devices that do not fit.
    """
    check("x", x, ("batch", "D", "L"))
    batch, channels, _ = x.shape
    check("weight", weight, (channels, "K"), x)
    K = weight.shape[1]
    if K == 0:
        raise ValueError("weight: got a kernel of 0, want at least 1")
    check("bias", bias, (channels,), x)
    check("initial_state", initial_state, (batch, channels, K - 1), x)

    if initial_state is None:
        initial_state = x.new_zeros(batch, channels, K - 1)
    seen = torch.cat([initial_state.to(x.dtype), x], -1)      # (batch, D, K - 1 + L)
    y = x  # conv1d refuses L = 0
    if x.numel():
        bias = None if bias is None else bias.to(x.dtype)
        y = F.conv1d(seen, weight[:, None].to(x.dtype), bias, groups=channels)
    return (y, seen[..., x.shape[2]:].clone()) if return_state else y
