"""Linear attention: golden data, a float64 loop, forms, states, traffic, errors."""
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.attention import linear_attention, linear_bytes
from opsbyte.attention.linear import FEATURE_MAPS
from opsbyte.traffic import Traffic

GOLDEN = Path(__file__).parents[1] / "golden" / "linear_attention.npz"
FORMS = ("recurrent", "parallel", "chunkwise")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def loop(q, k, v, *, feature_map, normalize, initial_state=None):
    """One sequence, head and step at a time, in float64: (out, state)."""
    (B, H, T, _), Hkv = q.shape, k.shape[1]
    phi = FEATURE_MAPS[feature_map]
    q, k, v = phi(q.double()), phi(k.double()), v.double()
    out = torch.zeros(B, H, T, v.shape[3], dtype=torch.float64)
    width = v.shape[3] + normalize
    S = torch.zeros(B, Hkv, k.shape[3], width, dtype=torch.float64)
    if initial_state is not None:
        S += initial_state
    for b in range(B):
        for t in range(T):
            for h in range(Hkv):
                value = torch.cat((v[b, h, t], torch.ones(int(normalize))))
                S[b, h] += torch.outer(k[b, h, t], value)
            for h in range(H):
                answer = q[b, h, t] @ S[b, h // (H // Hkv)]
                if normalize:
                    weight = answer[-1]
                    answer = answer[:-1] / weight if weight != 0 else answer[:-1] * 0
                out[b, h, t] = answer
    return out, S


def inputs(seed, B=1, H=2, Hkv=1, T=9, K=3, V=4, dtype=torch.float32):
    make = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, K), (B, Hkv, T, K), (B, Hkv, T, V))
    normal = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
    return [x.to(dtype) for x in normal]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 48, 64])
def test_golden(form, chunk):
    data = {name: torch.tensor(x) for name, x in np.load(GOLDEN).items()}
    q, k, v = data["q"], data["k"], data["v"]
    out, state = linear_attention(
        q, k, v, feature_map="identity", normalize=False, form=form, chunk=chunk,
        initial_state=data["initial_state"], return_state=True,
    )
    torch.testing.assert_close(out, data["out_identity"], **CLOSE)
    torch.testing.assert_close(state, data["state_identity"], **CLOSE)
    out = linear_attention(q, k, v, feature_map="elu+1", form=form, chunk=chunk)
    torch.testing.assert_close(out, data["out_elu1_normalized"], **CLOSE)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1 << 20), B=st.integers(1, 2), Hkv=st.integers(1, 2),
    groups=st.integers(1, 3), T=st.integers(0, 20), K=st.integers(1, 5),
    V=st.integers(1, 5), chunk=st.integers(1, 24), form=st.sampled_from(FORMS),
    feature_map=st.sampled_from(["elu+1", "relu", "identity"]), half=st.floats(0, 1),
)
def test_every_form_is_the_loop_whole_and_in_halves(
    seed, B, Hkv, groups, T, K, V, chunk, form, feature_map, half
):
    normalize = feature_map != "identity"  # its weights can sum to nearly 0
    q, k, v = inputs(seed, B, Hkv * groups, Hkv, T, K, V, torch.float64)
    first = torch.rand(B, Hkv, K, V + normalize, dtype=torch.float64)
    how = {"feature_map": feature_map, "normalize": normalize}
    want, last = loop(q, k, v, **how, initial_state=first)
    how |= {"form": form, "chunk": chunk, "return_state": True}
    out, state = linear_attention(q, k, v, **how, initial_state=first)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(state, last)

    cut, outs, state = int(T * half), [], first
    for part in (slice(0, cut), slice(cut, T)):
        tile = (x[:, :, part] for x in (q, k, v))
        out, state = linear_attention(*tile, **how, initial_state=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), want)
    torch.testing.assert_close(state, last)


def test_normalised_answers_are_means_of_the_values():
    q, k, v = inputs(0, T=30)
    constant = torch.full_like(v, 7.0)
    torch.testing.assert_close(
        linear_attention(q, k, constant), torch.full((1, 2, 30, 4), 7.0)
    )


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_weight_are_zero(form):
    q, k, v = inputs(1, T=6)
    out = linear_attention(q, -k.abs(), v, feature_map="relu", form=form)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("form", FORMS)
def test_no_step_sees_the_future(form):
    q, k, v = inputs(2, T=20)
    before = linear_attention(q, k, v, form=form, chunk=8)
    k[:, :, 13:], v[:, :, 13:] = 100.0, -100.0
    after = linear_attention(q, k, v, form=form, chunk=8)
    assert torch.equal(before[:, :, :13], after[:, :, :13])
    assert not torch.isclose(before[:, :, 13:], after[:, :, 13:]).any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_does_not_leak_back(form, bad, which):
    q, k, v = inputs(8, T=20)
    before = linear_attention(q, k, v, form="recurrent")
    {"q": q, "k": k, "v": v}[which][:, :, 13, 1] = bad
    traffic = Traffic()
    after = linear_attention(q, k, v, form=form, chunk=8, traffic=traffic)
    torch.testing.assert_close(after[:, :, :13], before[:, :, :13], **CLOSE)
    want = linear_attention(q, k, v, form="recurrent")  # NaN where the loop has NaN
    torch.testing.assert_close(after, want, **CLOSE, equal_nan=True)
    chunk = {"recurrent": 1, "parallel": 20, "chunkwise": 8}[form]
    assert traffic.bytes == linear_bytes(
        batch=1, heads=2, kv_heads=1, tokens=20, key_dim=3, value_dim=4, chunk=chunk,
        normalize=True, itemsize=4,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(form, dtype):
    # 4,096 ones: a half-precision sum would stop at 2,048 (fp16) or 256 (bf16).
    T = 4096 if form != "recurrent" else 2304
    one = torch.ones(1, 1, T, 1, dtype=dtype)
    out, state = linear_attention(
        one, one, one, feature_map="identity", normalize=False, form=form,
        return_state=True,
    )
    assert out.dtype == dtype and state.dtype == torch.float32
    assert state.item() == T and out[0, 0, -1].item() == T
    q, k, v = inputs(3, T=40, dtype=dtype)
    out = linear_attention(q, k, v, form=form)
    want, _ = loop(q, k, v, feature_map="elu+1", normalize=True)
    eps = torch.finfo(dtype).eps  # the answer is rounded once
    torch.testing.assert_close(out.double(), want, rtol=eps, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients(form, groups):
    q, k, v = inputs(4, H=groups, T=7, dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    state = torch.rand(1, 1, 3, 5, dtype=torch.float64, requires_grad=True)

    def f(q, k, v, state):
        return linear_attention(
            q, k, v, form=form, chunk=3, initial_state=state, return_state=True
        )

    assert torch.autograd.gradcheck(f, (q, k, v, state), fast_mode=True)


@pytest.mark.parametrize("chunk", [1, 5, 16, 64, 100])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traffic_is_the_formula(chunk, normalize, dtype):
    T = 64
    q, k, v = inputs(5, B=2, H=4, Hkv=2, T=T, K=6, V=3, dtype=dtype)
    sizes = {
        "batch": 2, "heads": 4, "kv_heads": 2, "tokens": T, "key_dim": 6,
        "value_dim": 3, "normalize": normalize, "itemsize": q.element_size(),
    }
    how = {"normalize": normalize}
    traffic = Traffic()
    linear_attention(q, k, v, **how, chunk=chunk, traffic=traffic)
    assert traffic.bytes == linear_bytes(**sizes, chunk=chunk)
    states = -(-T // chunk) * 2 * 2 * 6 * (3 + normalize) * 4
    assert traffic.stored == 2 * 4 * T * 3 * q.element_size() + states
    for form, same in (("recurrent", 1), ("parallel", T)):
        traffic = Traffic()
        linear_attention(q, k, v, **how, form=form, traffic=traffic)
        assert traffic.bytes == linear_bytes(**sizes, chunk=same)


def test_a_function_as_feature_map_may_change_the_dimension():
    q, k, v = inputs(6, T=12)
    def square(x):
        return (x[..., None] * x[..., None, :]).flatten(-2)

    outs = [
        linear_attention(q, k, v, feature_map=square, form=form, chunk=5)
        for form in FORMS
    ]
    weights = ((q @ k.mT) ** 2).tril()
    want = weights @ v / weights.sum(-1, keepdim=True)
    for out in outs:
        torch.testing.assert_close(out, want, **CLOSE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(2, 9, 3)}, "q: got"),
        ({"k": torch.ones(1, 1, 8, 3)}, "v: got"),
        ({"k": torch.ones(1, 1, 9, 2)}, "k: got"),
        ({"k": torch.ones(1, 1, 8, 3), "v": torch.ones(1, 1, 8, 4)}, "k: got 8 steps"),
        ({"q": torch.ones(1, 3, 9, 3), "k": torch.ones(1, 2, 9, 3),
          "v": torch.ones(1, 2, 9, 4)}, "q: got 3 heads"),
        ({"v": torch.ones(1, 1, 9, 4).double()}, "v: got torch.float64"),
        ({"v": torch.ones(1, 1, 9, 4, device="meta")}, "v: got device meta"),
        ({"form": "scan"}, "form: got 'scan'"),
        ({"feature_map": "softmax"}, "feature_map: got 'softmax'"),
        ({"chunk": 0}, "chunk: got 0"),
        ({"initial_state": torch.zeros(1, 1, 3, 4)}, "initial_state: got"),
    ],
)
def test_errors_name_the_argument(change, message):
    q, k, v = inputs(7)
    args = {"q": q, "k": k, "v": v} | change
    with pytest.raises(ValueError, match=message):
        linear_attention(**args)
