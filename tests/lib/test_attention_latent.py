"""Latent attention: golden data, a float64 loop, absorption, the cache, errors."""
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.attention import LatentAttention, LatentCache

GOLDEN = Path(__file__).parents[1] / "golden" / "latent_attention.npz"
WEIGHTS = ("wq_a", "q_norm", "wq_b", "wkv_a", "kv_norm", "wkv_b", "wo")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def golden():
    data = {name: torch.tensor(x) for name, x in np.load(GOLDEN).items()}
    layer = LatentAttention(
        **{name: data[name] for name in WEIGHTS}, n_heads=data["n_heads"].item(),
        rope_theta=data["rope_theta"].item(), norm_eps=data["norm_eps"].item(),
    )
    return layer, data


def to(layer, dtype):
    return replace(layer, **{name: getattr(layer, name).to(dtype) for name in WEIGHTS})


def random_layer(n_heads=2, nope=3, rope=4, v=5, q_rank=6, kv_rank=7, seed=0):
    layer = LatentAttention.random(
        d_model=8, n_heads=n_heads, q_rank=q_rank, kv_rank=kv_rank, nope_dim=nope,
        rope_dim=rope, v_dim=v, seed=seed,
    )
    make = torch.Generator().manual_seed(seed)
    norms = {n: torch.rand(getattr(layer, n).shape, generator=make) + 0.5
             for n in ("q_norm", "kv_norm")}
    return to(replace(layer, **norms), torch.float64)


def loop(layer, x):
    """The paper's equations, a token and a head at a time; rotation as complex."""
    B, T, _ = x.shape
    heads, rank, rope = layer.n_heads, layer.kv_norm.shape[0], layer.rope_dim
    nope, v = layer.nope_dim, layer.v_dim
    out = torch.zeros(B, T, heads * v, dtype=x.dtype)

    def norm(c, weight):
        return c / ((c * c).mean() + layer.norm_eps).sqrt() * weight

    def turn(y, t):
        z = torch.complex(y[0::2], y[1::2])
        angle = t * layer.rope_theta ** (-torch.arange(0, rope, 2) / rope).double()
        return torch.view_as_real(z * torch.exp(1j * angle)).ravel()

    for b in range(B):
        down = [layer.wkv_a @ x[b, t] for t in range(T)]
        c = [norm(d[:rank], layer.kv_norm) for d in down]
        k_rope = [turn(d[rank:], t) for t, d in enumerate(down)]
        for h in range(heads):
            up = layer.wkv_b[h * (nope + v) : (h + 1) * (nope + v)]
            for t in range(T):
                size = nope + rope
                wq = layer.wq_b[h * size : (h + 1) * size]
                q = wq @ norm(layer.wq_a @ x[b, t], layer.q_norm)
                q_rope = turn(q[nope:], t)
                scores = torch.stack([
                    (q[:nope] @ (up[:nope] @ c[j]) + q_rope @ k_rope[j]) / size**0.5
                    for j in range(t + 1)
                ])
                weights = scores.softmax(0)
                values = torch.stack([up[nope:] @ c[j] for j in range(t + 1)])
                out[b, t, h * v : (h + 1) * v] = weights @ values
    return out @ layer.wo.mT


@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("prefill", [0, 1, 6, 10])
def test_golden_at_once_and_through_the_cache(absorb, prefill):
    layer, data = golden()
    x, cache, outs = data["x"], LatentCache(), []
    steps = [x[:, :prefill], *x[:, prefill:].split(1, 1)]
    for tokens in (s for s in steps if s.shape[1]):
        outs.append(layer(tokens, cache=cache, absorb=absorb))
    torch.testing.assert_close(torch.cat(outs, 1), data["out"], **CLOSE)
    sizes = {name: data[name].item() for name in ("kv_rank", "rope_dim")}
    assert len(cache) == 10
    assert cache.bytes == 2 * 10 * (sizes["kv_rank"] + sizes["rope_dim"]) * 4


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 1 << 20), B=st.integers(1, 2), T=st.integers(1, 7),
    n_heads=st.integers(1, 3), nope=st.integers(1, 4), rope=st.sampled_from([2, 4, 6]),
    v=st.integers(1, 4), ranks=st.integers(1, 6), absorb=st.booleans(),
    cut=st.integers(0, 7),
)
def test_it_is_the_loop_whole_and_in_stretches(
    seed, B, T, n_heads, nope, rope, v, ranks, absorb, cut
):
    layer = random_layer(n_heads, nope, rope, v, ranks, 7 - ranks, seed)
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, 8, generator=make, dtype=torch.float64)
    want = loop(layer, x)
    torch.testing.assert_close(layer(x, absorb=absorb), want)
    cache, outs = LatentCache(), []
    for part in (x[:, :cut], x[:, cut:]):
        outs.append(layer(part, cache=cache, absorb=absorb))
    torch.testing.assert_close(torch.cat(outs, 1), want)


def test_a_cache_filled_by_one_form_is_read_by_the_other():
    layer = random_layer()
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    cache = LatentCache()
    layer(x[:, :8], cache=cache)
    torch.testing.assert_close(
        layer(x[:, 8:], cache=cache, absorb=True), layer(x)[:, 8:]
    )


@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(absorb, dtype):
    layer, data = golden()
    out = to(layer, dtype)(data["x"].to(dtype), absorb=absorb)
    assert out.dtype == dtype
    # weights, latents, queries and answers are each rounded: a few per cent in
    # bf16, an eighth of that in fp16
    error = (out.double() - data["out"]).norm() / data["out"].norm()
    assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("absorb", [False, True])
def test_gradients(absorb):
    layer = random_layer()
    x = torch.randn(1, 4, 8, dtype=torch.float64, requires_grad=True)
    weights = [getattr(layer, name).requires_grad_() for name in WEIGHTS]

    def f(x, *weights):
        trained = replace(layer, **dict(zip(WEIGHTS, weights, strict=True)))
        return trained(x, absorb=absorb)

    assert torch.autograd.gradcheck(f, (x, *weights), fast_mode=True)


def test_errors_name_the_argument():
    layer, data = golden()
    with pytest.raises(ValueError, match="x: got"):
        layer(data["x"][0])
    with pytest.raises(ValueError, match="x: got torch.float64"):
        layer(data["x"].double())
    with pytest.raises(ValueError, match="wo: got"):
        replace(layer, wo=layer.wo[:, :-1])
    with pytest.raises(ValueError, match="n_heads: got 0"):
        replace(layer, n_heads=0)
    with pytest.raises(ValueError, match="wq_b: got|wkv_b: got|wo: got"):
        replace(layer, n_heads=3)
    with pytest.raises(ValueError, match="kv_norm: got torch.float16"):
        replace(layer, kv_norm=layer.kv_norm.half())
    with pytest.raises(ValueError, match="rotary rows"):
        random_layer(rope=3)
