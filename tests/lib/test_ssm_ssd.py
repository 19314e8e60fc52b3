"""SSD: golden data, a float64 loop, gated linear attention, halves, odd inputs."""
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.attention.gated import gated_linear_attention
from opsbyte.ssm import selective_scan, ssd

GOLDEN = Path(__file__).parents[1] / "golden" / "state_space_duality.npz"
FORMS = ("recurrent", "quadratic", "chunked")
CLOSE = dict(rtol=1e-4, atol=1e-5)  # float32 against golden data or a float64 loop


def loop(x, dt, A, B, C, D, initial_state):
    """One sequence, one head, one step at a time, in float64 numpy."""
    x, dt, A, B, C, D, S = (
        t.double().numpy() for t in (x, dt, A, B, C, D, initial_state)
    )
    S, out = S.copy(), np.zeros_like(x)
    per_group = x.shape[2] // B.shape[2]
    for b in range(x.shape[0]):
        for h in range(x.shape[2]):
            g = h // per_group
            for t in range(x.shape[1]):
                write = dt[b, t, h] * np.outer(x[b, t, h], B[b, t, g])
                S[b, h] = np.exp(dt[b, t, h] * A[h]) * S[b, h] + write
                out[b, t, h] = S[b, h] @ C[b, t, g] + D[h] * x[b, t, h]
    return torch.tensor(out), torch.tensor(S)


def problem(seed, batch=2, L=9, G=2, per_group=2, P=3, N=4, dtype=torch.float32):
    """Arguments by name."""
    torch.manual_seed(seed)
    H = G * per_group
    shapes = dict(
        x=(batch, L, H, P), dt=(batch, L, H), A=(H,), B=(batch, L, G, N),
        C=(batch, L, G, N), D=(H,), initial_state=(batch, H, P, N),
    )
    p = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    p["A"], p["dt"] = -p["A"].abs(), p["dt"].exp()
    return p


def run(p, **options):
    return ssd(**p, return_state=True, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", (1, 7, 8, 64))
def test_golden(form, chunk):
    data = {name: torch.tensor(x) for name, x in np.load(GOLDEN).items()}
    args = [data[name] for name in ("x", "dt", "A", "B", "C")]
    y, state = ssd(
        *args, initial_state=data["initial_state"], return_state=True,
        form=form, chunk=chunk,
    )
    torch.testing.assert_close(y, data["out"], **CLOSE)
    torch.testing.assert_close(state, data["final_state"], **CLOSE)
    y = ssd(*args, data["D"], form=form, chunk=chunk)
    torch.testing.assert_close(y, data["out_D_zero_state"], **CLOSE)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31), batch=st.integers(1, 2), L=st.integers(1, 50),
    G=st.integers(1, 3), per_group=st.integers(1, 3), P=st.integers(1, 4),
    N=st.integers(1, 4), chunk=st.integers(1, 60),
)
def test_forms_equal_a_float64_loop(seed, batch, L, G, per_group, P, N, chunk):
    p = problem(seed, batch, L, G, per_group, P, N)
    y, state = loop(**p)
    for form in FORMS:
        got, got_state = run(p, form=form, chunk=chunk)
        torch.testing.assert_close(got.double(), y, **CLOSE)
        torch.testing.assert_close(got_state.double(), state, **CLOSE)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31), L=st.integers(0, 40), cut=st.integers(0, 40),
    chunk=st.integers(1, 20), form=st.sampled_from(FORMS),
)
def test_two_parts_with_a_carried_state_equal_the_whole(seed, L, cut, chunk, form):
    p, cut = problem(seed, L=L, dtype=torch.float64), min(cut, L)
    in_time = ("x", "dt", "B", "C")
    first = {n: t[:, :cut] if n in in_time else t for n, t in p.items()}
    second = {n: t[:, cut:] if n in in_time else t for n, t in p.items()}
    y, state = run(p, form=form, chunk=chunk)
    y1, second["initial_state"] = run(first, form=form, chunk=chunk)
    y2, end = run(second, form=form, chunk=chunk)
    torch.testing.assert_close(torch.cat([y1, y2], 1), y)
    torch.testing.assert_close(end, state)


def test_long_sequences_pass_in_several_spans():
    p = problem(0, batch=1, L=1500, G=1, per_group=4, P=2, N=2, dtype=torch.float64)
    for chunk in (64, 100):  # 16 and 6 chunks at a time
        for got, want in zip(run(p, chunk=chunk), loop(**p), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_strong_decay_stays_finite_and_right(form):
    # Log decays of -50 and beyond with weak ones between: a float32 running sum
    # would have lost the weak ones.
    p = problem(1, batch=1, L=2048, G=1, per_group=2, P=2, N=2)
    p["dt"] = torch.where(torch.rand(p["dt"].shape) < 0.3, 50.0, 1e-3)
    p["A"] = torch.tensor([-1.0, -300.0])
    y, state = run(p, form=form)
    want, want_state = loop(**p)
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), want_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision_is_carried_in_float32(form, dtype):
    p = {name: t.to(dtype) for name, t in problem(2, L=100).items()}
    y, state = run(p, form=form)
    want, want_state = run({name: t.float() for name, t in p.items()}, form=form)
    assert y.dtype == dtype and state.dtype == torch.float32
    torch.testing.assert_close(state, want_state)
    torch.testing.assert_close(y, want.to(dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ("x", "dt", "B", "C"))
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
def test_what_is_not_finite_stays_in_its_future(form, name, value):
    """A masked weight of 0 times NaN is NaN, so masks alone would let it through."""
    p = problem(7, L=40)
    want, _ = run(p, form=form, chunk=16)
    p[name] = p[name].clone()
    p[name][0, 21, 0] = value
    y, _ = run(p, form=form, chunk=16)
    torch.testing.assert_close(y[:, :21], want[:, :21], **CLOSE)
    torch.testing.assert_close(y[1], want[1], **CLOSE)     # the other sequence
    if torch.tensor(value).isnan():
        assert y[0, 21, 0].isnan().any()


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    p = problem(3, batch=1, L=7, P=2, N=2, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in p.values()]

    def f(*tensors):
        return run(dict(zip(p, tensors, strict=True)), form=form, chunk=3)

    assert torch.autograd.gradcheck(f, inputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("attention_form", ("recurrent", "parallel", "chunkwise"))
def test_equals_gated_linear_attention(form, attention_form):
    """C is the query, B the key, dt x the value, dt A the logarithm of the decay."""
    p = problem(4, L=70)
    del p["D"]
    y, state = run(p, form=form, chunk=16)
    per_head = p["x"].shape[2] // p["B"].shape[2]
    q, k = (p[name].repeat_interleave(per_head, 2).transpose(1, 2) for name in "CB")
    out, S = gated_linear_attention(
        q, k, (p["dt"][..., None] * p["x"]).transpose(1, 2), (p["dt"] * p["A"]).mT,
        form=attention_form, chunk=16,
        initial_state=p["initial_state"].mT, return_state=True,
    )
    torch.testing.assert_close(y.transpose(1, 2), out, **CLOSE)
    torch.testing.assert_close(state.mT, S, **CLOSE)


def test_equals_a_selective_scan_with_one_decay_per_head():
    """Mamba-1 with the same A for all states of a head is Mamba-2."""
    p = problem(5, L=30, G=1, per_group=3, dtype=torch.float64)
    batch, L, H, P = p["x"].shape
    N = p["B"].shape[3]
    y, state = run(p)
    u, delta = p["x"].flatten(2).mT, p["dt"].repeat_interleave(P, 2).mT
    A = p["A"].repeat_interleave(P)[:, None].expand(H * P, N)
    want, h = selective_scan(
        u, delta, A, p["B"][:, :, 0].mT, p["C"][:, :, 0].mT,
        p["D"].repeat_interleave(P), return_state=True,
        initial_state=p["initial_state"].reshape(batch, H * P, N),
    )
    torch.testing.assert_close(y, want.mT.reshape(batch, L, H, P))
    torch.testing.assert_close(state, h.reshape(batch, H, P, N))


BAD = {
    "x": torch.zeros(2, 9, 4), "dt": torch.zeros(2, 8, 4), "A": torch.zeros(3),
    "B": torch.zeros(2, 9, 3, 4), "C": torch.zeros(2, 9, 1, 4), "D": torch.zeros(4, 3),
    "initial_state": torch.zeros(2, 4, 4, 3), "form": "dual", "chunk": 2.5,
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        ssd(**{**problem(6), name: BAD[name]})
