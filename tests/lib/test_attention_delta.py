"""The (gated) delta rule: golden data, a float64 loop, what it is meant to do."""
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.attention import gated_delta_rule

GOLDEN = Path(__file__).parents[1] / "golden" / "gated_linear_attention.npz"
FORMS = ("recurrent", "chunkwise")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def loop(q, k, v, beta, g, initial_state=None):
    """One sequence, head and step at a time, in float64: (out, state)."""
    (B, H, T, K), groups = q.shape, q.shape[1] // k.shape[1]
    q, k, v, beta, g = (x.double() for x in (q, k, v, beta, g))
    out = torch.zeros(B, H, T, v.shape[3], dtype=torch.float64)
    S = torch.zeros(B, H, K, v.shape[3], dtype=torch.float64)
    if initial_state is not None:
        S += initial_state
    eye = torch.eye(K, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                key, value = k[b, h // groups, t], v[b, h // groups, t]
                fade = g[b, h, t].exp().expand(K)[:, None]
                # the papers' form: S = (I − β k kᵀ) diag(α) S + β k vᵀ
                forget = eye - beta[b, h, t] * torch.outer(key, key)
                S[b, h] = forget @ (fade * S[b, h])
                S[b, h] += beta[b, h, t] * torch.outer(key, value)
                out[b, h, t] = q[b, h, t] @ S[b, h]
    return out, S


def inputs(seed, B=1, H=2, Hkv=1, T=9, K=3, V=4, strength=1.0, per_channel=False):
    """float64 q, unit k, v, beta, log_decay; strength 0: decays of all sizes."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, K), (B, Hkv, T, K), (B, Hkv, T, V))
    q, k, v = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
    beta = torch.rand(B, H, T, generator=make, dtype=torch.float64)
    shape = (B, H, T, K) if per_channel else (B, H, T)
    g = torch.rand(shape, generator=make, dtype=torch.float64)
    g = -strength * g if strength else -(10 ** (8 * g - 5))
    return q, F.normalize(k, dim=-1), v, beta, g


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 48, 64])
def test_golden(form, chunk):
    data = {name: torch.tensor(x) for name, x in np.load(GOLDEN).items()}
    args = data["q"], data["k_unit"], data["v"], data["beta"]
    out, state = gated_delta_rule(
        *args, data["log_decay_scalar"], form=form, chunk=chunk,
        initial_state=data["initial_state"], return_state=True,
    )
    torch.testing.assert_close(out, data["out_gated_delta"], **CLOSE)
    torch.testing.assert_close(state, data["state_gated_delta"], **CLOSE)
    out = gated_delta_rule(*args, form=form, chunk=chunk)
    torch.testing.assert_close(out, data["out_delta_zero_state"], **CLOSE)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1 << 20), B=st.integers(1, 2), Hkv=st.integers(1, 2),
    groups=st.integers(1, 2), T=st.integers(0, 20), K=st.integers(1, 5),
    V=st.integers(1, 5), chunk=st.integers(1, 24), form=st.sampled_from(FORMS),
    strength=st.sampled_from([0, 0.1, 5]), per_channel=st.booleans(),
    half=st.floats(0, 1),
)
def test_every_form_is_the_loop_whole_and_in_halves(
    seed, B, Hkv, groups, T, K, V, chunk, form, strength, per_channel, half
):
    args = inputs(seed, B, Hkv * groups, Hkv, T, K, V, strength, per_channel)
    first = torch.rand(B, Hkv * groups, K, V, dtype=torch.float64)
    want, last = loop(*args, first)
    how = {"form": form, "chunk": chunk, "return_state": True}
    out, state = gated_delta_rule(*args, **how, initial_state=first)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(state, last)

    cut, outs, state = int(T * half), [], first
    for part in (slice(0, cut), slice(cut, T)):
        tile = (x[:, :, part] for x in args)
        out, state = gated_delta_rule(*tile, **how, initial_state=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), want)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("form", FORMS)
def test_writing_a_key_again_replaces_its_value(form):
    """With β = 1 and orthogonal keys it is a dictionary; a sum would mix."""
    keys = torch.eye(4)[[0, 1, 2, 0, 1, 0]].reshape(1, 1, 6, 4)
    values = torch.arange(12.0).reshape(1, 1, 6, 2)
    _, state = gated_delta_rule(
        keys, keys, values, torch.ones(1, 1, 6), form=form, return_state=True
    )
    latest = torch.stack((values[0, 0, 5], values[0, 0, 4], values[0, 0, 2]))
    torch.testing.assert_close(state[0, 0], F.pad(latest, (0, 0, 0, 1)))


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_one_key_repeated_does_not_lose_digits(chunk, beta):
    """The hardest triangular system: every entry of L is β, powers of L explode.

    With β = 2 a step reflects the state: roundings never die out and answers
    reach 100, so the tolerance is 1e-4 of that.
    """
    q, k, v, _, g = (x.float() for x in inputs(0, T=256, strength=1e-3))
    k = k[:, :, :1].expand_as(k)
    args = q, k, v, torch.full_like(g, beta), g
    want, _ = loop(*args)
    out = gated_delta_rule(*args, chunk=chunk).double()
    atol = 1e-5 if beta == 1 else 1e-4 * want.abs().max().item()
    torch.testing.assert_close(out, want, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("weak", [-50.0, -0.01, 0.0])
def test_strong_decay_over_a_long_sequence(form, per_channel, weak):
    T = 4096 if form == "chunkwise" else 2048
    q, k, v, beta, g = inputs(1, H=1, T=T)
    g = torch.where(torch.arange(T) % 2 == 0, -50.0, weak).double().reshape(1, 1, T)
    if per_channel:  # and channels that never meet: one strong, one weak, one mixed
        g = torch.stack((g * 0 - 50, g * 0 + weak, g), -1)
    want, last = loop(q, k, v, beta, g)
    args = (x.float() for x in (q, k, v, beta, g))
    out, state = gated_delta_rule(*args, form=form, return_state=True)
    torch.testing.assert_close(out.double(), want, **CLOSE)
    torch.testing.assert_close(state.double(), last, **CLOSE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_minus_infinity_forgets_all(form, per_channel):
    q, k, v, beta, g = inputs(2, T=20, per_channel=per_channel)
    g[:, :, 11] = -torch.inf
    out = gated_delta_rule(q, k, v, beta, g, form=form, chunk=8)
    after = (x[:, :, 11:] for x in (q, k, v, beta, g))
    torch.testing.assert_close(out[:, :, 11:], gated_delta_rule(*after))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_what_is_not_finite_does_not_leak_back(form, per_channel, bad, which):
    args = [x.float() for x in inputs(7, T=20, per_channel=per_channel)]
    before = gated_delta_rule(*args, form="recurrent")
    args[which][:, :, 13] = bad
    after = gated_delta_rule(*args, form=form, chunk=8)
    torch.testing.assert_close(after[:, :, :13], before[:, :, :13], **CLOSE)
    want = gated_delta_rule(*args, form="recurrent")
    torch.testing.assert_close(after, want, **CLOSE, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(form, dtype):
    args = [x.to(dtype) for x in inputs(3, T=200, strength=0.01)]
    out, state = gated_delta_rule(*args, form=form, return_state=True)
    want, last = loop(*args)
    assert out.dtype == dtype and state.dtype == torch.float32
    torch.testing.assert_close(state.double(), last, **CLOSE)
    eps = torch.finfo(dtype).eps  # the answer is rounded once
    torch.testing.assert_close(out.double(), want, rtol=eps, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_gradients(form, per_channel):
    args = [x.requires_grad_() for x in inputs(4, T=7, per_channel=per_channel)]
    state = torch.rand(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def f(*args):
        *args, state = args
        return gated_delta_rule(
            *args, form=form, chunk=3, initial_state=state, return_state=True
        )

    assert torch.autograd.gradcheck(f, (*args, state), fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
def test_no_step_sees_the_future(form):
    q, k, v, beta, g = inputs(5, T=20)
    before = gated_delta_rule(q, k, v, beta, g, form=form, chunk=8)
    k[:, :, 13:], v[:, :, 13:], beta[:, :, 13:], g[:, :, 13:] = 0.5, 90.0, 0.3, -3.0
    after = gated_delta_rule(q, k, v, beta, g, form=form, chunk=8)
    assert torch.equal(before[:, :, :13], after[:, :, :13])
    assert not torch.isclose(before[:, :, 13:], after[:, :, 13:]).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": torch.zeros(1, 2, 8)}, "beta: got"),
        ({"beta": torch.zeros(1, 2, 9).int()}, "beta: got torch.int32"),
        ({"beta": torch.zeros(1, 2, 9, device="meta")}, "beta: got device meta"),
        ({"log_decay": torch.zeros(1, 2, 9, 4)}, "log_decay: got"),
        ({"log_decay": torch.full((1, 2, 9), 0.5)}, "log_decay: got 0.5, want <= 0"),
        ({"form": "parallel"}, "form: got 'parallel', want one of recurrent, chunk"),
        ({"chunk": -1}, "chunk: got -1"),
        ({"initial_state": torch.zeros(1, 1, 3, 4)}, "initial_state: got"),
    ],
)
def test_errors_name_the_argument(change, message):
    names = ("q", "k", "v", "beta", "log_decay")
    args = dict(zip(names, inputs(6), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**args)
