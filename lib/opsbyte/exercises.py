"""Check a reader's answer: right, nearly right, wrong, or not attempted yet.

The verdict is printed, never raised, so that a notebook with untouched
exercises runs to its end. An answer that equals a known mistake is told which
mistake it is.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def check(
    label: str,
    attempt: Any,
    reference: Any,
    cases: Sequence[tuple] | None = None,
    *,
    near: Mapping[str, Any] | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-9,
) -> bool:
    """Print a verdict on `attempt`; return True only if it is right.

    attempt, reference: two values (numbers, strings, arrays, tensors, or
        tuples and lists of these), or, with `cases`, two functions compared
        on every tuple of arguments in `cases`.
    near: hint -> a wrong value or function that readers often arrive at;
        an attempt that agrees with it everywhere is answered with the hint.
    rtol, atol: an element is right if |got - want| <= atol + rtol * |want|.

    Raises ValueError if `cases` is empty, or if a near miss cannot be told
    from the reference: such a check could not fail.
    """
    if cases is not None and not cases:
        raise ValueError("cases is empty: the check could not fail")
    trials = list(cases) if cases is not None else [None]
    wanted = [_answer(reference, case) for case in trials]
    hints = {hint: [_answer(wrong, case) for case in trials]
             for hint, wrong in (near or {}).items()}
    for hint, values in hints.items():
        if all(_equal(v, w, rtol, atol) for v, w in zip(values, wanted)):
            raise ValueError(f"the near miss {hint!r} equals the reference")

    try:
        got = [_answer(attempt, case) for case in trials]
    except NotImplementedError:
        got = [None]
    except Exception as error:  # the reader's own code may raise anything
        print(f"{label}: not yet, it raised {type(error).__name__}: {error}")
        return False
    if any(value is None or value is Ellipsis for value in got):
        print(f"{label}: not attempted yet")
        return False
    for hint, values in hints.items():
        if all(_equal(g, v, rtol, atol) for g, v in zip(got, values)):
            print(f"{label}: nearly. {hint}")
            return False
    for number, (g, w) in enumerate(zip(got, wanted), start=1):
        if not _equal(g, w, rtol, atol):
            where = f" in case {number} of {len(got)}" if cases else ""
            print(f"{label}: not yet{where}, {_difference(g, w)}")
            return False
    print(f"{label}: correct")
    return True


def _answer(subject: Any, case: tuple | None) -> Any:
    """The subject itself, or what it returns for one case."""
    return subject if case is None else subject(*case)


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a torch tensor, perhaps bf16 or on a GPU
        value = value.detach().cpu().double().numpy()
    return np.asarray(value)


def _equal(got: Any, want: Any, rtol: float, atol: float) -> bool:
    if isinstance(want, (tuple, list)):
        return (isinstance(got, (tuple, list)) and len(got) == len(want)
                and all(_equal(g, w, rtol, atol) for g, w in zip(got, want)))
    if isinstance(want, str) or isinstance(got, str):
        return isinstance(got, str) and got == want
    g, w = _array(got), _array(want)
    if g.shape != w.shape or g.dtype.kind not in "biufc":
        return False
    return bool(np.allclose(g, w, rtol=rtol, atol=atol))


def _difference(got: Any, want: Any) -> str:
    """What is wrong, without giving the answer away."""
    if isinstance(want, (str, tuple, list)) or isinstance(got, str):
        return f"your answer is {got!r}"
    g, w = _array(got), _array(want)
    if g.shape != w.shape:
        return f"your shape is {g.shape}, the right one is {w.shape}"
    if g.dtype.kind not in "biufc":
        return f"your answer is a {type(got).__name__}, not a number"
    if not np.isfinite(g).all():
        return "your answer has values that are not finite"
    if g.ndim == 0 and w != 0:
        return f"your answer is {float(g / w):.4g} times the right one"
    return f"the largest error is {np.abs(g - w).max():.3g}"
