"""Selective scan and recurrence: golden data, a float64 loop, halves, odd inputs."""
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.ssm import recurrence, selective_scan

GOLDEN = Path(__file__).parents[1] / "golden" / "selective_scan.npz"
FORMS = ("sequential", "parallel", "chunked")
CLOSE = dict(rtol=1e-4, atol=1e-5)  # float32 against golden data or a float64 loop
ORDER = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")


def loop(u, delta, A, B, C, D, z, delta_bias, initial_state):
    """One sequence, one channel, one step at a time, in float64 numpy."""
    u, delta, A, B, C, D, z, delta_bias, h = (
        t.double().numpy()
        for t in (u, delta, A, B, C, D, z, delta_bias, initial_state)
    )
    h, out = h.copy(), np.zeros_like(u)
    for b in range(u.shape[0]):
        for d in range(u.shape[1]):
            for t in range(u.shape[2]):
                dt = np.logaddexp(0, delta[b, d, t] + delta_bias[d])
                h[b, d] = np.exp(dt * A[d]) * h[b, d] + dt * u[b, d, t] * B[b, :, t]
                y = h[b, d] @ C[b, :, t] + D[d] * u[b, d, t]
                out[b, d, t] = y * z[b, d, t] / (1 + np.exp(-z[b, d, t]))
    return torch.tensor(out), torch.tensor(h)


def problem(seed, batch=2, D=3, N=4, L=9, dtype=torch.float32, rates=1.0):
    """Arguments by name; `rates` scales A."""
    torch.manual_seed(seed)
    shapes = dict(
        u=(batch, D, L), delta=(batch, D, L), A=(D, N), B=(batch, N, L),
        C=(batch, N, L), D=(D,), z=(batch, D, L), delta_bias=(D,),
        initial_state=(batch, D, N),
    )
    p = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    p["A"] = -rates * p["A"].abs()
    return p


def run(p, **options):
    return selective_scan(**p, delta_softplus=True, return_state=True, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", (1, 7, 64))
def test_golden(form, chunk):
    data = {name: torch.tensor(x) for name, x in np.load(GOLDEN).items()}
    p = {name: data[name] for name in ORDER}
    y, state = run(p, form=form, chunk=chunk)
    torch.testing.assert_close(y, data["out"], **CLOSE)
    torch.testing.assert_close(state, data["last_state"], **CLOSE)
    plain = [data[name] for name in ("u", "delta_positive", "A", "B", "C")]
    y = selective_scan(*plain, form=form, chunk=chunk)
    torch.testing.assert_close(y, data["out_no_D_no_z"], **CLOSE)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31), batch=st.integers(1, 3), D=st.integers(1, 4),
    N=st.integers(1, 4), L=st.integers(1, 70), chunk=st.integers(1, 80) | st.none(),
)
def test_forms_equal_a_float64_loop(seed, batch, D, N, L, chunk):
    p = problem(seed, batch, D, N, L)
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
    in_time = ("u", "delta", "B", "C", "z")
    first = {n: t[..., :cut] if n in in_time else t for n, t in p.items()}
    second = {n: t[..., cut:] if n in in_time else t for n, t in p.items()}
    y, state = run(p, form=form, chunk=chunk)
    y1, second["initial_state"] = run(first, form=form, chunk=chunk)
    y2, end = run(second, form=form, chunk=chunk)
    torch.testing.assert_close(torch.cat([y1, y2], -1), y)
    torch.testing.assert_close(end, state)


@pytest.mark.parametrize("form", FORMS)
def test_strong_decay_stays_finite_and_right(form):
    # delta A runs to -1e4 a step: products of decays underflow, to the right value.
    p = problem(1, batch=1, D=4, N=2, L=3000, rates=3000.0)
    p["A"][0], p["A"][1, 0] = 0, -1e-3  # beside states that never forget
    y, state = run(p, form=form)
    want, want_state = loop(**p)
    assert y.isfinite().all()
    scale = want.abs().amax((0, 2))     # the unforgetting sums grow with time
    error = (y.double() - want).abs().amax((0, 2))
    assert (error <= 1e-5 * scale).all()
    torch.testing.assert_close(state.double(), want_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision_is_carried_in_float32(form, dtype):
    p = {name: t.to(dtype) for name, t in problem(2, L=200).items()}
    y, state = run(p, form=form)
    want, want_state = run({name: t.float() for name, t in p.items()}, form=form)
    assert y.dtype == dtype and state.dtype == torch.float32
    torch.testing.assert_close(state, want_state)
    torch.testing.assert_close(y, want.to(dtype))


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    p = problem(3, batch=1, D=2, N=2, L=7, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in p.values()]

    def f(*tensors):
        return run(dict(zip(p, tensors, strict=True)), form=form, chunk=3)

    assert torch.autograd.gradcheck(f, inputs)


@pytest.mark.parametrize("leaf", (1, 2, 5, 100))
@pytest.mark.parametrize("T", (1, 2, 3, 8, 13, 31))
def test_recurrence_and_its_gradients(T, leaf):
    torch.manual_seed(T)
    a, b, h = torch.rand(T, 3), torch.randn(T, 3), torch.ones(3)
    a, b, h = a.double(), b.double(), h.double()
    want, state = [], h
    for t in range(T):
        state = a[t] * state + b[t]
        want.append(state)
    kept = a.clone(), b.clone()
    got = recurrence(a, b, h, leaf=leaf)
    torch.testing.assert_close(got, torch.stack(want))
    assert torch.equal(a, kept[0]) and torch.equal(b, kept[1])
    inputs = [x.requires_grad_() for x in (a, b, h)]
    f = lambda a, b, h: recurrence(a, b, h, leaf=leaf)  # noqa: E731
    assert torch.autograd.gradcheck(f, inputs)
    if T == 3:
        assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.parametrize("steps", (1, 8, 64))
@pytest.mark.parametrize("threads", (1, 2))
def test_wide_and_narrow_steps(steps, threads):
    """The chunked form loops over wide steps and merges narrow ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for D in (1, 16, 1024):  # 64 to 65,536 elements a step
            p = problem(9, batch=4, D=D, N=16, L=75)
            want = run(p, form="sequential")
            for got, w in zip(run(p, chunk=steps), want, strict=True):
                torch.testing.assert_close(got, w, **CLOSE)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ("u", "delta", "B", "C", "z"))
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
def test_what_is_not_finite_stays_in_its_future(form, name, value):
    p = problem(10, L=40)
    want, _ = run(p, form=form, chunk=16)
    p[name] = p[name].clone()
    p[name][0, 0, 21] = value
    y, _ = run(p, form=form, chunk=16)
    assert torch.equal(y[..., :21], want[..., :21])
    assert torch.equal(y[1], want[1])                # the other sequence
    if torch.tensor(value).isnan():
        assert y[0, 0, 21].isnan()


def test_inputs_are_left_alone():
    p = problem(4, L=40)
    before = {name: t.clone() for name, t in p.items()}
    for form in FORMS:
        run(p, form=form, chunk=8)
    assert all(torch.equal(p[name], before[name]) for name in p)


def test_euler_and_zero_order_hold_agree_for_small_steps():
    """delta B is the first-order term of (exp(delta A) - 1) / A · B."""
    p = problem(5, batch=1, D=1, N=3, L=1, dtype=torch.float64)
    A, B = p["A"], p["B"][:, :, 0]
    for delta in (1e-2, 1e-4):
        steps = torch.full((1, 1, 1), delta).double()
        one = torch.ones(1, 1, 1).double()
        _, euler = selective_scan(one, steps, A, p["B"], p["C"], return_state=True)
        hold = torch.expm1(delta * A) / A * B
        relative = ((euler - hold) / hold).abs().max()
        assert 0 < relative < delta * A.abs().max()


BAD = {
    "u": torch.zeros(2, 3), "delta": torch.zeros(2, 3, 8), "A": torch.zeros(4, 3),
    "B": torch.zeros(2, 5, 9), "C": torch.zeros(2, 4, 8), "D": torch.zeros(4),
    "z": torch.zeros(2, 3, 9, 1), "delta_bias": torch.zeros(3).int(),
    "initial_state": torch.zeros(2, 4, 3), "form": "fast", "chunk": 0,
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        selective_scan(**{**problem(6), name: BAD[name]})


def test_a_list_and_another_device_are_refused():
    p = problem(7)
    with pytest.raises(ValueError, match="^delta: got list"):
        selective_scan(**{**p, "delta": [1.0]})
    with pytest.raises(ValueError, match="^B: got device meta"):
        selective_scan(**{**p, "B": p["B"].to("meta")})


def test_softplus_is_off_by_default():
    p = problem(8)
    positive = {**p, "delta": F.softplus(p["delta"] + p["delta_bias"][:, None])}
    del positive["delta_bias"]
    torch.testing.assert_close(
        selective_scan(**positive), selective_scan(**p, delta_softplus=True)
    )
