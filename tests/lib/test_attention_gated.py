"""Gated linear and output-gated attention: golden data, loops, strong decay."""
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.attention import (
    attention,
    gated_linear_attention,
    linear_attention,
    output_gated_attention,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "gated_linear_attention.npz"
FORMS = ("recurrent", "parallel", "chunkwise")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def loop(q, k, v, g, initial_state=None):
    """One sequence, head and step at a time, in float64: (out, state)."""
    (B, H, T, K), groups = q.shape, q.shape[1] // k.shape[1]
    q, k, v, g = (x.double() for x in (q, k, v, g))
    out = torch.zeros(B, H, T, v.shape[3], dtype=torch.float64)
    S = torch.zeros(B, H, K, v.shape[3], dtype=torch.float64)
    if initial_state is not None:
        S += initial_state
    for b in range(B):
        for h in range(H):
            for t in range(T):
                key, value = k[b, h // groups, t], v[b, h // groups, t]
                fade = g[b, h, t].exp().expand(K)[:, None]
                S[b, h] = fade * S[b, h] + torch.outer(key, value)
                out[b, h, t] = q[b, h, t] @ S[b, h]
    return out, S


def inputs(seed, B=1, H=2, Hkv=1, T=9, K=3, V=4, strength=1.0, per_channel=False):
    """float64 q, k, v, log_decay; strength 0 gives decays over many magnitudes."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, K), (B, Hkv, T, K), (B, Hkv, T, V))
    q, k, v = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
    shape = (B, H, T, K) if per_channel else (B, H, T)
    g = torch.rand(shape, generator=make, dtype=torch.float64)
    g = -strength * g if strength else -(10 ** (8 * g - 5))
    return q, k, v, g


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 48, 64])
@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_golden(form, chunk, decay):
    data = {name: torch.tensor(x) for name, x in np.load(GOLDEN).items()}
    out, state = gated_linear_attention(
        data["q"], data["k"], data["v"], data[f"log_decay_{decay}"], form=form,
        chunk=chunk, initial_state=data["initial_state"], return_state=True,
    )
    torch.testing.assert_close(out, data[f"out_{decay}_decay"], **CLOSE)
    torch.testing.assert_close(state, data[f"state_{decay}_decay"], **CLOSE)


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
    out, state = gated_linear_attention(*args, **how, initial_state=first)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(state, last)

    cut, outs, state = int(T * half), [], first
    for part in (slice(0, cut), slice(cut, T)):
        tile = (x[:, :, part] for x in args)
        out, state = gated_linear_attention(*tile, **how, initial_state=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), want)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_without_decay_it_is_linear_attention(form, per_channel):
    q, k, v, g = (x.float() for x in inputs(0, T=40, per_channel=per_channel))
    out = gated_linear_attention(q, k, v, 0 * g, form=form)
    want = linear_attention(q, k, v, feature_map="identity", normalize=False)
    torch.testing.assert_close(out, want, **CLOSE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("weak", [-50.0, -0.01, 0.0])
def test_strong_decay_over_a_long_sequence(form, per_channel, weak):
    """float32 stays right to 1e-5 where −50 a step sums to −204,800.

    With `weak`, every second step hardly decays: there a difference of running
    sums would have lost all digits of it.
    """
    T = 4096 if not (form == "parallel" and per_channel) else 2048
    q, k, v, g = inputs(1, H=1, T=T, per_channel=per_channel)
    g = torch.where(torch.arange(T) % 2 == 0, -50.0, weak).double().reshape(1, 1, T)
    if per_channel:  # and channels that never meet: one strong, one weak, one mixed
        g = torch.stack((g * 0 - 50, g * 0 + weak, g), -1)
    want, last = loop(q, k, v, g)
    args = (x.float() for x in (q, k, v, g))
    out, state = gated_linear_attention(*args, form=form, return_state=True)
    assert out.isfinite().all()
    # sums of T terms of size 1, where nothing decays, keep T roundings
    scale = want.abs().max().item()
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5 * scale)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_minus_infinity_forgets_all(form, per_channel):
    q, k, v, g = inputs(2, T=20, per_channel=per_channel)
    g[:, :, 11] = -torch.inf
    out = gated_linear_attention(q, k, v, g, form=form, chunk=8)
    after = (x[:, :, 11:] for x in (q, k, v, g))
    torch.testing.assert_close(out[:, :, 11:], gated_linear_attention(*after))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_does_not_leak_back(form, per_channel, bad, which):
    args = [x.float() for x in inputs(7, T=20, per_channel=per_channel)]
    before = gated_linear_attention(*args, form="recurrent")
    args[which][:, :, 13, 1] = bad
    after = gated_linear_attention(*args, form=form, chunk=8)
    torch.testing.assert_close(after[:, :, :13], before[:, :, :13], **CLOSE)
    want = gated_linear_attention(*args, form="recurrent")
    torch.testing.assert_close(after, want, **CLOSE, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(form, dtype):
    args = [x.to(dtype) for x in inputs(3, T=200, strength=0.01)]
    out, state = gated_linear_attention(*args, form=form, return_state=True)
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
        return gated_linear_attention(
            *args, form=form, chunk=3, initial_state=state, return_state=True
        )

    assert torch.autograd.gradcheck(f, (*args, state), fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
def test_no_step_sees_the_future(form):
    q, k, v, g = inputs(5, T=20)
    before = gated_linear_attention(q, k, v, g, form=form, chunk=8)
    for x in (k, v):
        x[:, :, 13:] = 100.0
    g[:, :, 13:] = -30.0
    after = gated_linear_attention(q, k, v, g, form=form, chunk=8)
    assert torch.equal(before[:, :, :13], after[:, :, :13])
    assert not torch.isclose(before[:, :, 13:], after[:, :, 13:]).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay": torch.zeros(1, 2, 8)}, "log_decay: got"),
        ({"log_decay": torch.zeros(1, 1, 9)}, "log_decay: got"),
        ({"log_decay": torch.zeros(1, 2, 9, 4)}, "log_decay: got"),
        ({"log_decay": torch.zeros(1, 2, 9).long()}, "log_decay: got torch.int64"),
        ({"log_decay": torch.zeros(1, 2, 9, device="meta")}, "log_decay: got device"),
        ({"log_decay": torch.full((1, 2, 9), 0.5)}, "log_decay: got 0.5, want <= 0"),
        ({"log_decay": None}, "log_decay: got NoneType"),
        ({"k": torch.zeros(1, 1, 8, 3, dtype=torch.float64)}, "v: got"),
        ({"form": "scan"}, "form: got 'scan'"),
        ({"chunk": 1.5}, "chunk: got 1.5"),
        ({"initial_state": torch.zeros(1, 1, 3, 4)}, "initial_state: got"),
    ],
)
def test_errors_name_the_argument(change, message):
    args = dict(zip(("q", "k", "v", "log_decay"), inputs(6), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        gated_linear_attention(**args)


class TestOutputGate:
    def args(self, T=7):
        q, k, v, _ = inputs(7, H=4, Hkv=2, T=T)
        make = torch.Generator().manual_seed(8)
        return q, k, v, torch.randn(1, 4, T, 4, generator=make, dtype=torch.float64)

    def test_it_is_attention_times_a_sigmoid(self):
        q, k, v, gate = self.args()
        how = {"window": 3, "sinks": 1, "scale": 0.3}
        out = attention(q, k, v, **how)
        for g in (gate, gate[..., :1]):
            want = out / (1 + (-g).exp())
            got = output_gated_attention(q, k, v, g, **how) if g is gate else (
                output_gated_attention(q, k, v, g[..., 0], **how)
            )
            torch.testing.assert_close(got, want)

    def test_a_closed_gate_is_silent_and_an_open_one_is_attention(self):
        q, k, v, gate = self.args()
        closed = output_gated_attention(q, k, v, gate * 0 - torch.inf)
        assert torch.equal(closed, torch.zeros_like(closed))
        opened = output_gated_attention(q, k, v, gate * 0 + torch.inf)
        torch.testing.assert_close(opened, attention(q, k, v))

    def test_half_precision_is_rounded_at_the_end(self):
        args = [x.half() for x in self.args()]
        want = output_gated_attention(*(x.double() for x in args))
        got = output_gated_attention(*args)
        assert got.dtype == torch.float16
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=1e-5)

    def test_gradients(self):
        args = [x.requires_grad_() for x in self.args(T=3)]
        assert torch.autograd.gradcheck(output_gated_attention, args)

    def test_errors_name_the_argument(self):
        q, k, v, gate = self.args()
        with pytest.raises(ValueError, match="gate: got"):
            output_gated_attention(q, k, v, gate[:, :2])
        with pytest.raises(ValueError, match="gate: got torch.int64"):
            output_gated_attention(q, k, v, gate.long())
