"""What the recurrent forms share: checks, dtypes, chunks, sums of log-decays."""
from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from opsbyte.attention import _check
from opsbyte.attention.dense import accumulator, wide


def check_form(form: str, forms: Iterable[str], chunk: int, T: int) -> int:
    """The chunk to use of T steps: all for the parallel form, never more.

    Raises ValueError on an unknown form or a chunk below 1.
    """
    if form not in forms:
        raise ValueError(f"form: got {form!r}, want one of {', '.join(forms)}")
    _check.check_count("chunk", chunk)
    return max(1, T if form == "parallel" else min(chunk, T))


def check_recurrent(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k, v fit together and are equally long."""
    _check.check_tensors(q, k, v)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"k: got {k.shape[2]} steps, want q's {q.shape[2]}: a recurrence reads"
            " a query at every step (carry earlier keys in initial_state)"
        )


def check_gate(name: str, gate: Tensor, q: Tensor, shapes: tuple) -> None:
    """Raise ValueError unless the gate has one of the shapes, q's dtype, device."""
    if not isinstance(gate, Tensor) or tuple(gate.shape) not in shapes:
        got = tuple(gate.shape) if isinstance(gate, Tensor) else type(gate).__name__
        raise ValueError(f"{name}: got {got}, want {' or '.join(map(str, shapes))}")
    if gate.dtype not in _check.DTYPES:
        raise ValueError(f"{name}: got {gate.dtype}, want a floating dtype")
    if gate.device != q.device:
        raise ValueError(f"{name}: got device {gate.device}, want {q.device} as q")


def check_log_decay(log_decay: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The checked log-decay as `(B, Hq, T, 1 or K)`, in the accumulator's dtype.

    Clamped where exp() is zero anyway, so that −inf (forget all) is safe too.
    """
    shape = tuple(q.shape[:3])
    check_gate("log_decay", log_decay, q, (shape, (*shape, k.shape[3])))
    if (log_decay > 0).any():
        raise ValueError(
            f"log_decay: got {log_decay.max().item():.3g}, want <= 0: the logarithm"
            " of a factor between 0 and 1"
        )
    if log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(-1)
    log_decay = log_decay.to(accumulator(q).dtype)
    # exp(-104) is below float32's smallest subnormal, exp(-746) below float64's
    return log_decay.clamp(min=-746 if log_decay.dtype == torch.float64 else -104)


def first_state(initial_state: Tensor | None, shape: tuple, q: Tensor) -> Tensor:
    """The state to start from, in float32 or, for float64 input, float64."""
    dtype = accumulator(q).dtype
    if initial_state is None:
        return torch.zeros(shape, dtype=dtype, device=q.device)
    check_gate("initial_state", initial_state, q, (shape,))
    return initial_state.to(dtype)


# Rows (heads × steps) whose chunks are prepared together: enough for products in
# large batches, few enough to stay in a CPU's cache. Any number gives the same.
ROWS = 2048


def segments(chunk: int, *tensors: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Tensors `(N, …, T, dim)` as `(chunks, N, …, chunk, dim)`, a few at a time.

    Copied, so that what meets the state together lies together. The last chunk is
    filled up with zeros. With each stretch comes which of all the chunks it holds.
    """
    N, T = tensors[0].shape[0], tensors[0].shape[-2]
    if pad := -T % chunk:
        tensors = [F.pad(x, (0, 0, 0, pad)) for x in tensors]
    shape = (T + pad) // chunk, chunk
    chunks = [x.unflatten(-2, shape).movedim(-3, 0) for x in tensors]
    count = max(1, ROWS // (chunk * max(N, 1)))
    for first in range(0, shape[0], count):
        span = slice(first, first + count)
        yield span, [x[span].contiguous() for x in chunks]


def finite(out: Tensor) -> bool:
    """Whether all is finite: a sum with NaN or an infinity in it is not.

    A chunk weighs later steps by 0, and 0·NaN is NaN. So where this is False the
    caller goes step by step, and no step's NaN reaches an earlier one.
    """
    return bool(out.sum().isfinite())


def per_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(B·Hq, T, dim)` each in the accumulator's dtype, key heads repeated."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return tuple(accumulator(x).flatten(0, 1) for x in (q, k, v))


def before(log_decay: Tensor) -> Tensor:
    """Decay from the chunk's start to each step, own included, in logarithms."""
    return log_decay.cumsum(-2)


def after(log_decay: Tensor) -> Tensor:
    """Decay from each step, own excluded, to the chunk's end, in logarithms."""
    total = before(wide(log_decay))
    return (total[..., -1:, :] - total).to(log_decay.dtype)


def between(log_decay: Tensor) -> Tensor:
    """Decay from step j to i, own excluded and included: `(…, C, 1)` to `(…, C, C)`.

    0 where i < j. In float64, like `after`: where large sums cancel, float32 would
    be left with no digit of a weak decay next to a strong one.
    """
    total = before(wide(log_decay))
    return (total - total.mT).to(log_decay.dtype).clamp_(max=0)
