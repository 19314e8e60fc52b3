"""Argument checks that the attention forms share."""
from __future__ import annotations

import math

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(q, k, v) -> None:
    """Raise ValueError unless q, k, v are `(B, H, T, D)` and fit together.

    Keys and values share heads and time; q and k share the head dimension;
    the query heads are a multiple of the key heads.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dims(name, x, "(batch, heads, time, dim)")
        check_like(name, x, q)
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or q.shape[3] == 0:
        raise ValueError(
            f"k: got {tuple(k.shape)}, want the batch and head dimension of q,"
            f" {tuple(q.shape)}, not 0"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: got {tuple(v.shape)}, want the batch, heads and time of k,"
            f" {tuple(k.shape)}"
        )
    check_heads(q.shape[1], k.shape[1])


def check_dims(name: str, x, dims: str) -> None:
    """Raise ValueError unless x is a tensor with the dimensions named."""
    if not isinstance(x, torch.Tensor) or x.dim() != dims.count(",") + 1:
        got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{name}: got {got}, want {dims}")


def check_like(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    """Raise ValueError unless x has q's dtype, a floating one, and device."""
    if x.dtype not in DTYPES or x.dtype != q.dtype:
        raise ValueError(
            f"{name}: got {x.dtype}, want one floating dtype for all, as q's {q.dtype}"
        )
    if x.device != q.device:
        raise ValueError(f"{name}: got device {x.device}, want {q.device} as q")


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise ValueError unless `kv_heads` divides `heads`."""
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q: got {heads} heads, want a multiple of the {kv_heads} key heads, not 0"
        )


def check_mask(causal: bool, window: int | None, sinks: int) -> None:
    """Raise ValueError on a window or sinks that mean nothing."""
    if window is not None:
        check_count("window", window)
        if not causal:
            raise ValueError("window: got one with causal=False, want causal=True")
    check_count("sinks", sinks, least=0)


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise ValueError unless `value` is a whole number, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: got {value!r}, want a whole number >= {least}")


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """`scale`, or 1 / sqrt(head_dim) for None. ValueError unless finite."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale: got {scale!r}, want a finite number or None")
    return float(scale)
