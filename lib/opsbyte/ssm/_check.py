"""Argument checks, dtypes and gradients: what the state space models share."""
from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype of states and sums: float32, or float64 for float64 input."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check(
    name: str, x: Tensor | None, shape: tuple, like: Tensor | None = None
) -> None:
    """Raise ValueError unless x is a float tensor of `shape` on like's device.

    In `shape` a number is a required size and a string names a free one. None
    stands for an optional argument that was left out.
    """
    if x is None:
        return
    want = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: got {type(x).__name__}, want a tensor {want}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name}: got {x.dtype}, want a floating dtype")
    if len(shape) != x.dim() or any(
        isinstance(n, int) and n != m for n, m in zip(shape, x.shape, strict=True)
    ):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, want {want}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: got device {x.device}, want {like.device}")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, want one of {', '.join(allowed)}")


def check_count(name: str, value: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: got {value!r}, want a whole number >= 1")


def needs_grad(*tensors: Tensor) -> bool:
    """Whether autograd follows an operation on these, so none may overwrite them."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
