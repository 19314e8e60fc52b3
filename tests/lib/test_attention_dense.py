"""Dense attention: golden data, a float64 loop, torch's operator, odd inputs."""
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.attention import attention

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("self", "decode", "chunked_prefill", "window", "window_sinks")


def golden(case):
    data = np.load(GOLDEN / "softmax_attention.npz")
    q, k, v, out = (torch.tensor(data[f"{case}.{x}"]) for x in ("q", "k", "v", "out"))
    options = {
        "window": int(data[f"{case}.window"]) or None,
        "sinks": int(data[f"{case}.sinks"]),
    }
    return q, k, v, out, options


def loop(q, k, v, *, causal=True, window=None, sinks=0, scale=None):
    """One query, one head, one visible key at a time, in float64."""
    (B, H, Tq, D), (Hkv, Tk) = q.shape, k.shape[1:3]
    scale = 1 / math.sqrt(D) if scale is None else scale
    out = torch.zeros(B, H, Tq, v.shape[3], dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for b in range(B):
        for h in range(H):
            g = h // (H // Hkv)
            for i in range(Tq):
                own = Tk - Tq + i
                seen = [
                    j for j in range(Tk) if not causal
                    or j <= own and (window is None or own - j < window or j < sinks)
                ]
                scores = [scale * torch.dot(q[b, h, i], k[b, g, j]) for j in seen]
                if not seen:
                    continue
                top = max(scores)
                weights = [torch.exp(s - top) for s in scores]
                out[b, h, i] = sum(
                    w * v[b, g, j] for w, j in zip(weights, seen, strict=True)
                ) / sum(weights)
    return out


@st.composite
def problems(draw):
    """q, k, v of any small shape, and options."""
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    Tq, Tk = draw(st.integers(0, 7)), draw(st.integers(0, 9))
    B, D, Dv = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    causal = draw(st.booleans())
    options = {
        "causal": causal,
        "window": draw(st.none() | st.integers(1, 12)) if causal else None,
        "sinks": draw(st.integers(0, 3)),
        "scale": draw(st.sampled_from([None, 1.0, 0.3])),
    }
    q, k = torch.randn(B, heads, Tq, D), torch.randn(B, kv_heads, Tk, D)
    return q, k, torch.randn(B, kv_heads, Tk, Dv), options


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    q, k, v, out, options = golden(case)
    torch.testing.assert_close(attention(q, k, v, **options), out, rtol=1e-4, atol=1e-5)


@given(problems())
@settings(derandomize=True, deadline=None, max_examples=80)
def test_equals_a_float64_loop(problem):
    q, k, v, options = problem
    out = attention(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(out, loop(q, k, v, **options), rtol=1e-9, atol=1e-9)
    out = attention(q, k, v, **options)
    assert out.dtype == torch.float32
    torch.testing.assert_close(
        out.double(), loop(q, k, v, **options), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kv_heads", [8, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("Tq, Tk, causal, window", [
    (33, 33, True, None), (33, 33, False, None), (1, 40, True, None),
    (1, 40, True, 39), (1, 40, True, 40), (7, 40, True, None),
    (40, 40, True, 1), (40, 40, True, 5), (40, 40, True, 99),
])
def test_equals_torch(kv_heads, Tq, Tk, causal, window):
    torch.manual_seed(0)
    q = torch.randn(2, 8, Tq, 16)
    k, v = torch.randn(2, 2, kv_heads, Tk, 16)
    distance = torch.arange(Tk - Tq, Tk)[:, None] - torch.arange(Tk)
    mask = (distance >= 0) & (distance < (window or Tk)) if causal else None
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    out = attention(q, k, v, causal=causal, window=window)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_rows_that_see_nothing_are_zero():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 6, 8), *torch.randn(2, 1, 2, 4, 8)
    out = attention(q, k, v)
    assert (out[:, :, :2] == 0).all() and (out[:, :, 2:] != 0).all()
    assert (attention(q, k[:, :, :0], v[:, :, :0]) == 0).all()
    assert attention(q[:, :, :0], k, v).shape == (1, 4, 0, 8)


@given(problems(), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 8))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_only_rows_that_see_a_bad_value_show_it(problem, bad, j):
    q, k, v, options = problem
    if not k.shape[2]:
        return
    j %= k.shape[2]
    v[:, :, j, 0] = bad
    torch.testing.assert_close(
        attention(q, k, v, **options).double(), loop(q, k, v, **options),
        rtol=1e-4, atol=1e-5, equal_nan=True,
    )
    k[:, :, j] = math.nan
    torch.testing.assert_close(
        attention(q, k, v, **options).double(), loop(q, k, v, **options),
        rtol=1e-4, atol=1e-5, equal_nan=True,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_only_at_the_end(dtype):
    """Against float64 on the same rounded inputs: within one rounding."""
    torch.manual_seed(0)
    q, k, v = (torch.rand(1, 2, T, 16).to(dtype) for T in (4, 2048, 2048))
    out = attention(q, k, v)
    want = attention(q.double(), k.double(), v.double())
    assert out.dtype == dtype
    assert ((out - want).abs() <= torch.finfo(dtype).eps / 2 * want * 1.01).all()


def test_scores_beyond_the_range_of_half_precision():
    q = k = torch.full((1, 1, 2, 64), 60.0, dtype=torch.float16)   # 230,400 > 65,504
    v = torch.tensor([1.0, 3.0], dtype=torch.float16).view(1, 1, 2, 1)
    out = attention(q, k, v, scale=1.0)
    assert out.flatten().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("Tq, Tk, options", [
    (3, 5, {}), (5, 3, {}), (3, 3, {"causal": False}),
    (4, 6, {"window": 2, "sinks": 1}),
])
def test_gradients(Tq, Tk, options):
    torch.manual_seed(0)
    q = torch.randn(1, 4, Tq, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 2, Tk, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 2, Tk, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda *x: attention(*x, **options), (q, k, v))


def qkv(q=(2, 4, 3, 8), k=(2, 2, 5, 8), v=(2, 2, 5, 8)):
    return [torch.zeros(shape) for shape in (q, k, v)]


BAD = [
    ("q:", qkv(q=(4, 3, 8)), {}),
    ("k:", qkv(k=(3, 2, 5, 8)), {}),
    ("k:", qkv(k=(2, 2, 5, 7)), {}),
    ("v:", qkv(v=(2, 2, 4, 8)), {}),
    ("v:", qkv(v=(2, 4, 5, 8)), {}),
    ("q:", qkv(q=(2, 3, 3, 8)), {}),
    ("q:", qkv(q=(2, 1, 3, 8)), {}),
    ("k:", [x.to(t) for x, t in zip(qkv(), (torch.float, torch.half, torch.float),
                                    strict=True)], {}),
    ("q:", [x.long() for x in qkv()], {}),
    ("v:", [x.to(d) for x, d in zip(qkv(), ("cpu", "cpu", "meta"), strict=True)], {}),
    ("k:", [qkv()[0], None, qkv()[2]], {}),
    ("window:", qkv(), {"window": 0}),
    ("window:", qkv(), {"window": 1.5}),
    ("window:", qkv(), {"window": 2, "causal": False}),
    ("sinks:", qkv(), {"sinks": -1}),
    ("scale:", qkv(), {"scale": math.nan}),
    ("scale:", qkv(), {"scale": "1"}),
]


@pytest.mark.parametrize("name, tensors, options", BAD)
def test_refuses(name, tensors, options):
    with pytest.raises(ValueError, match=f"^{name}"):
        attention(*tensors, **options)
