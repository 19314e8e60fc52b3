"""FlashAttention, split-K and merging: all equal to dense attention."""
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.attention import (
    attention,
    flash_attention,
    merge_partial_attention,
    split_k_attention,
)
from torch.utils._python_dispatch import TorchDispatchMode

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("self", "decode", "chunked_prefill", "window", "window_sinks")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@st.composite
def problems(draw):
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    Tq, Tk = draw(st.integers(0, 20)), draw(st.integers(0, 24))
    B, D, Dv = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    causal = draw(st.booleans())
    options = {
        "causal": causal,
        "window": draw(st.none() | st.integers(1, 30)) if causal else None,
        "sinks": draw(st.integers(0, 9)),
        "scale": draw(st.sampled_from([None, 1.0, 0.3])),
    }
    q, k = torch.randn(B, heads, Tq, D), torch.randn(B, kv_heads, Tk, D)
    return q, k, torch.randn(B, kv_heads, Tk, Dv), options


def lse_of(q, k, *, causal, window, sinks, scale):
    """Log-sum-exp of the visible scores, from the definition."""
    Tq, Tk = q.shape[2], k.shape[2]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    distance = torch.arange(Tk - Tq, Tk)[:, None] - torch.arange(Tk)
    near = (distance < (window or Tk)) | (torch.arange(Tk) < sinks)
    if causal:
        scores = scores.masked_fill(~((distance >= 0) & near), -math.inf)
    return scores.logsumexp(-1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", [
    flash_attention,
    lambda *x, **o: flash_attention(*x, block_q=3, block_k=5, **o),
    lambda *x, **o: flash_attention(*x, block_q=1, block_k=1, **o),
    lambda *x, **o: split_k_attention(*x, splits=3, **o),
], ids=["default", "3x5", "1x1", "split"])
def test_golden(case, form):
    data = np.load(GOLDEN / "softmax_attention.npz")
    q, k, v, out = (torch.tensor(data[f"{case}.{x}"]) for x in ("q", "k", "v", "out"))
    window, sinks = int(data[f"{case}.window"]) or None, int(data[f"{case}.sinks"])
    torch.testing.assert_close(form(q, k, v, window=window, sinks=sinks), out, **CLOSE)


def test_merge_golden():
    data = np.load(GOLDEN / "merge_partial_attention.npz")
    a = {name: torch.tensor(data[name]) for name in data}
    parts = a["out_a"], a["lse_a"], a["out_b"], a["lse_b"]
    out, lse = merge_partial_attention(*parts)
    torch.testing.assert_close(out, a["out"], **CLOSE)
    torch.testing.assert_close(lse, a["lse"], **CLOSE)
    # The same numbers in torch's layout.
    to_batch = lambda x: x.transpose(0, 1)[None] if x.dim() == 3 else x[None]  # noqa: E731
    out, lse = merge_partial_attention(*map(to_batch, parts))
    torch.testing.assert_close(out, to_batch(a["out"]), **CLOSE)
    torch.testing.assert_close(lse, to_batch(a["lse"]), **CLOSE)


@given(problems(), st.integers(1, 9), st.integers(1, 9))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_equals_dense(problem, block_q, block_k):
    q, k, v, options = problem
    out, lse = flash_attention(
        q, k, v, block_q=block_q, block_k=block_k, return_lse=True, **options
    )
    torch.testing.assert_close(out, attention(q, k, v, **options), **CLOSE)
    torch.testing.assert_close(lse, lse_of(q, k, **options), **CLOSE)


@given(problems(), st.integers(1, 30))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_split_k_equals_dense(problem, splits):
    q, k, v, options = problem
    out, lse = split_k_attention(q, k, v, splits=splits, return_lse=True, **options)
    torch.testing.assert_close(out, attention(q, k, v, **options), **CLOSE)
    torch.testing.assert_close(lse, lse_of(q, k, **options), **CLOSE)


@given(problems(), st.integers(0, 24))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_merging_two_halves_equals_the_whole(problem, cut):
    """Merging is order-free, and a half without a key changes nothing."""
    q, k, v, options = problem
    options |= {"causal": False, "window": None, "return_lse": True}
    halves = [
        flash_attention(q, k[:, :, part], v[:, :, part], **options)
        for part in (slice(cut), slice(cut, None))
    ]
    out, lse = flash_attention(q, k, v, **options)
    for a, b in (halves, halves[::-1]):
        merged = merge_partial_attention(*a, *b)
        torch.testing.assert_close(merged[0], out, **CLOSE)
        torch.testing.assert_close(merged[1], lse, **CLOSE)


def test_merging_a_side_that_saw_nothing():
    out, lse = torch.randn(1, 1, 2, 3), torch.tensor([[[0.5, -math.inf]]])
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    out[..., 1, :] = 7                       # garbage behind an lse of −inf
    for pair in ((out, lse, *nothing), (*nothing, out, lse)):
        merged, both = merge_partial_attention(*pair)
        assert torch.equal(merged[..., 0, :], out[..., 0, :])
        assert (merged[..., 1, :] == 0).all()
        assert torch.equal(both, lse)


def test_merging_far_apart():
    """No overflow, and the far larger side wins outright."""
    a, b = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    big, small = torch.tensor([[[3e4]]]), torch.tensor([[[-3e4]]])
    out, lse = merge_partial_attention(a, big, b, small)
    assert torch.equal(out, a) and torch.equal(lse, big)


@given(problems(), st.sampled_from([math.nan, math.inf]), st.integers(0, 23),
       st.integers(1, 9), st.integers(1, 9))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_only_rows_that_see_a_bad_value_show_it(problem, bad, j, block_q, block_k):
    q, k, v, options = problem
    if not k.shape[2]:
        return
    j %= k.shape[2]
    v[:, :, j, 0] = bad
    for _ in range(2):
        want = attention(q, k, v, **options)
        for out in (
            flash_attention(q, k, v, block_q=block_q, block_k=block_k, **options),
            split_k_attention(q, k, v, splits=block_k, **options),
        ):
            torch.testing.assert_close(out, want, equal_nan=True, **CLOSE)
        k[:, :, j] = math.nan


def test_the_running_maximum_is_needed():
    """Scores that overflow exp in float32, rising from tile to tile."""
    k = torch.arange(1.0, 9).view(1, 1, 8, 1) * 100
    q, v = torch.ones(1, 1, 8, 1), torch.arange(8.0).view(1, 1, 8, 1)
    out, lse = flash_attention(q, k, v, block_q=4, block_k=2, scale=1, return_lse=True)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse, k[..., 0])
    out = flash_attention(q, -k, v, block_q=4, block_k=2, scale=1)
    torch.testing.assert_close(out, torch.zeros_like(v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [
    lambda *x: flash_attention(*x, block_k=64),
    lambda *x: split_k_attention(*x, splits=32),
], ids=["flash", "split"])
def test_half_precision_rounds_only_at_the_end(dtype, form):
    torch.manual_seed(0)
    q, k, v = (torch.rand(1, 2, T, 16).to(dtype) for T in (4, 2048, 2048))
    out, want = form(q, k, v), attention(q.double(), k.double(), v.double())
    assert out.dtype == dtype
    assert ((out - want).abs() <= torch.finfo(dtype).eps / 2 * want * 1.01).all()


@pytest.mark.parametrize("Tq, Tk, options", [
    (3, 5, {}), (5, 3, {}), (3, 3, {"causal": False}),
    (4, 6, {"window": 2, "sinks": 1}),
])
def test_gradients(Tq, Tk, options):
    torch.manual_seed(0)
    q = torch.randn(1, 4, Tq, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 2, Tk, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 2, Tk, 2, dtype=torch.float64, requires_grad=True)
    options = options | {"return_lse": Tq <= Tk}   # −inf minus −inf is no number
    check = torch.autograd.gradcheck
    check(lambda *x: flash_attention(*x, block_q=2, block_k=2, **options), (q, k, v))
    check(lambda *x: split_k_attention(*x, splits=2, **options), (q, k, v))


def test_tiles_no_query_sees_are_not_computed():
    """A poisoned key outside the window would show up in any tile it is in."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 64, 4)
    clean = flash_attention(q, k, v, window=8, block_q=8, block_k=8)
    k[:, :, :8] = v[:, :, :8] = math.nan
    out = flash_attention(q, k, v, window=8, block_q=8, block_k=8)
    assert torch.equal(out[:, :, 16:], clean[:, :, 16:])


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_memory_is_linear_in_time():
    """No tensor is larger than the inputs, or than the scores of one tile."""
    for T in (128, 256, 512):
        q, k, v = torch.randn(3, 1, 2, T, 8)
        with Largest() as plain:
            attention(q, k, v)
        with Largest() as flash:
            flash_attention(q, k, v, block_q=16, block_k=32)
        assert plain.elements == 2 * T * T
        assert flash.elements == 2 * max(T * 8, 16 * 32)


def qkv(q=(2, 4, 3, 8), k=(2, 2, 5, 8), v=(2, 2, 5, 8)):
    return [torch.zeros(shape) for shape in (q, k, v)]


@pytest.mark.parametrize("name, tensors, options", [
    ("q:", qkv(q=(4, 3, 8)), {}),
    ("k:", qkv(k=(3, 2, 5, 8)), {}),
    ("v:", qkv(v=(2, 2, 4, 8)), {}),
    ("q:", qkv(q=(2, 3, 3, 8)), {}),
    ("q:", [x.long() for x in qkv()], {}),
    ("v:", [*qkv()[:2], qkv()[2].half()], {}),
    ("window:", qkv(), {"window": 0}),
    ("sinks:", qkv(), {"sinks": True}),
    ("scale:", qkv(), {"scale": math.inf}),
])
def test_refuses(name, tensors, options):
    for form in (flash_attention, split_k_attention):
        with pytest.raises(ValueError, match=f"^{name}"):
            form(*tensors, **options)


@pytest.mark.parametrize("form, options", [
    (flash_attention, {"block_q": 0}), (flash_attention, {"block_k": 2.0}),
    (split_k_attention, {"splits": 0}),
])
def test_refuses_blocks(form, options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}:"):
        form(*qkv(), **options)


@pytest.mark.parametrize("name, shapes", [
    ("out_a, out_b:", [(1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 5), (1, 2, 3)]),
    ("out_a, out_b:", [(2, 4), (2,), (2, 4), (2,)]),
    ("lse_a:", [(1, 2, 3, 4), (1, 3, 2), (1, 2, 3, 4), (1, 2, 3)]),
    ("lse_b:", [(5, 3, 8), (3, 5), (5, 3, 8), (5, 3)]),
])
def test_merge_refuses(name, shapes):
    with pytest.raises(ValueError, match=f"^{name}"):
        merge_partial_attention(*map(torch.zeros, shapes))
