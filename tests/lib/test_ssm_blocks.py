"""Convolution, Mamba blocks and hybrid stacks: prefill, steps, an independent loop."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.ssm import (
    AttentionBlock,
    HybridStack,
    KVState,
    Mamba2Block,
    MambaBlock,
    SSMState,
    causal_conv,
    state_bytes,
)

WIDTH = 12
PATTERN = ("mamba", "attention", "mamba2", "attention")
BLOCKS = {
    "mamba": lambda: MambaBlock(WIDTH, d_state=3),
    "mamba2": lambda: Mamba2Block(WIDTH, d_state=3, head_dim=4, groups=3),
    "attention": lambda: AttentionBlock(WIDTH, heads=6, kv_heads=2),
    "window": lambda: AttentionBlock(WIDTH, heads=2, window=4),
    "hybrid": lambda: HybridStack(
        WIDTH, PATTERN, mamba=dict(d_state=5), mamba2=dict(head_dim=6, d_state=4),
        attention=dict(heads=3, window=7),
    ),
}


def make(name, seed=0):
    """A block whose parameters are all away from zeros and ones."""
    torch.manual_seed(seed)
    block = BLOCKS[name]()
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.3 * torch.rand_like(p))
    return block


def flat(state):
    """The tensors of a state of any kind."""
    return [state] if isinstance(state, torch.Tensor) else sum(map(flat, state), [])


def silu(x):
    return x / (1 + np.exp(-x))


def conv_loop(x, weight, bias):
    """x (L, D) in float64 numpy, one output at a time."""
    K, out = weight.shape[1], np.tile(bias, (len(x), 1))
    for t in range(len(x)):
        for k in range(K):
            if t - K + 1 + k >= 0:
                out[t] += weight[:, k] * x[t - K + 1 + k]
    return out


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31), L=st.integers(1, 12), K=st.integers(1, 5),
    cut=st.integers(0, 12),
)
def test_conv_equals_a_loop_and_its_own_halves(seed, L, K, cut):
    torch.manual_seed(seed)
    x, weight, bias = torch.randn(2, 3, L).double(), torch.randn(3, K), torch.randn(3)
    weight, bias, cut = weight.double(), bias.double(), min(cut, L)
    y, state = causal_conv(x, weight, bias, return_state=True)
    for b in range(2):
        want = conv_loop(x[b].T.numpy(), weight.numpy(), bias.numpy())
        torch.testing.assert_close(y[b].T, torch.tensor(want))
    y1, s = causal_conv(x[..., :cut], weight, bias, return_state=True)
    y2, s = causal_conv(
        x[..., cut:], weight, bias, initial_state=s, return_state=True
    )
    torch.testing.assert_close(torch.cat([y1, y2], -1), y)
    assert torch.equal(s, state) and s.shape == (2, 3, K - 1)


def test_mamba_equals_an_independent_loop():
    block = make("mamba")
    w = {name: p.detach().double().numpy() for name, p in block.named_parameters()}
    x = torch.randn(1, 11, WIDTH)
    u, z = np.split(x[0].double().numpy() @ w["in_proj.weight"].T, 2, axis=1)
    u = silu(conv_loop(u, w["conv_weight"], w["conv_bias"]))
    projected = u @ w["x_proj.weight"].T
    delta, B, C = projected[:, :1], projected[:, 1:4], projected[:, 4:]
    delta = np.logaddexp(0, delta @ w["dt_proj.weight"].T + w["dt_proj.bias"])
    h, ys = np.zeros((2 * WIDTH, 3)), []
    for t in range(11):
        decay = np.exp(-delta[t][:, None] * np.exp(w["A_log"]))
        h = decay * h + np.outer(delta[t] * u[t], B[t])
        ys.append((h @ C[t] + w["D"] * u[t]) * silu(z[t]))
    want = torch.tensor(np.array(ys) @ w["out_proj.weight"].T)
    torch.testing.assert_close(block(x)[0].double(), want, rtol=1e-4, atol=1e-5)


def test_mamba2_equals_an_independent_loop():
    block = make("mamba2")   # 6 heads of 4, 3 groups, 3 states
    w = {name: p.detach().double().numpy() for name, p in block.named_parameters()}
    x = torch.randn(1, 11, WIDTH)
    projected = x[0].double().numpy() @ w["in_proj.weight"].T
    z, xBC, dt = projected[:, :24], projected[:, 24:66], projected[:, 66:]
    xBC = silu(conv_loop(xBC, w["conv_weight"], w["conv_bias"]))
    u, B, C = np.split(xBC, [24, 33], axis=1)
    dt = np.logaddexp(0, dt + w["dt_bias"])
    S, ys = np.zeros((6, 4, 3)), []
    for t in range(11):
        y = np.zeros((6, 4))
        for h in range(6):
            b, c = (m[t].reshape(3, 3)[h // 2] for m in (B, C))
            v = u[t].reshape(6, 4)[h]
            S[h] = np.exp(-dt[t, h] * np.exp(w["A_log"][h])) * S[h]
            S[h] += dt[t, h] * np.outer(v, b)
            y[h] = S[h] @ c + w["D"][h] * v
        gated = (y.reshape(24) * silu(z[t])).reshape(3, 8)
        norm = gated / np.sqrt((gated**2).mean(1, keepdims=True) + 1e-5)
        ys.append(norm.reshape(24) * w["norm_weight"])
    want = torch.tensor(np.array(ys) @ w["out_proj.weight"].T)
    torch.testing.assert_close(block(x)[0].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_decoding_step_by_step_equals_prefill(name):
    block, x = make(name), torch.randn(2, 21, WIDTH)
    with torch.no_grad():
        y, state = block(x, return_state=True)
        step, ys = block.initial_state(2), []
        for t in range(x.shape[1]):
            out, step = block.step(x[:, t], step)
            ys.append(out)
    assert y.abs().max() > 0.1  # or else the next line would say nothing
    torch.testing.assert_close(torch.stack(ys, 1), y, rtol=1e-5, atol=1e-5)
    for a, b in zip(flat(step), flat(state), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("cut", (1, 2, 13, 20))
def test_prefill_in_two_parts_then_steps(name, cut):
    block, x = make(name), torch.randn(2, 21, WIDTH)
    with torch.no_grad():
        y = block(x)
        y1, state = block(x[:, :cut], return_state=True)
        y2, state = block(x[:, cut:-1], state, return_state=True)
        y3, _ = block.step(x[:, -1], state)
    got = torch.cat([y1, y2, y3[:, None]], 1)
    torch.testing.assert_close(got, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_no_block_sees_ahead(name):
    block, x = make(name), torch.randn(1, 9, WIDTH)
    changed = x.clone()
    changed[:, 6:] += 1
    with torch.no_grad():
        a, b = block(x), block(changed)
    torch.testing.assert_close(a[:, :6], b[:, :6])
    assert (a[:, 6:] - b[:, 6:]).abs().amin((0, 2)).max() > 0


@pytest.mark.parametrize("name", ("mamba", "mamba2"))
def test_half_precision_keeps_its_state_in_float32(name):
    block, x = make(name), torch.randn(2, 30, WIDTH)
    want = block(x)
    block, x = block.bfloat16(), x.bfloat16()
    y, state = block(x, return_state=True)
    out, step = block.step(x[:, 0], block.initial_state(2))
    assert y.dtype == out.dtype == torch.bfloat16
    assert state.ssm.dtype == step.ssm.dtype == torch.float32
    scale = want.abs().max()
    assert (y - want).abs().max() < 0.05 * scale
    assert (out - want[:, 0]).abs().max() < 0.05 * scale


def test_gradients_reach_every_parameter():
    stack = make("hybrid")
    stack(torch.randn(2, 9, WIDTH)).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in stack.parameters())


def test_hybrid_is_a_residual_sum_of_its_blocks():
    stack, x = make("hybrid"), torch.randn(2, 9, WIDTH)
    want = x
    for norm, block in zip(stack.norms, stack.blocks, strict=True):
        want = want + block(norm(want))
    torch.testing.assert_close(stack(x), want)


def test_only_attention_grows_with_the_tokens():
    stack = HybridStack(
        WIDTH, PATTERN, mamba2=dict(head_dim=6, d_state=4), attention=dict(heads=3)
    )
    sizes, D = {}, 2 * WIDTH
    for tokens in (5, 50):
        _, state = stack(torch.randn(2, tokens, WIDTH), return_state=True)
        kinds = [SSMState, KVState, SSMState, KVState]
        assert [type(s) for s in state] == kinds
        sizes[tokens] = state_bytes(state)
    conv, ssm = 3 * (D + D + 2 * 4), D * 16 + D * 4  # both blocks' numbers a sequence
    assert sizes[5]["fixed"] == sizes[50]["fixed"] == 4 * 2 * (conv + ssm)
    assert sizes[50]["kv"] == 10 * sizes[5]["kv"] == 4 * 2 * (2 * 2 * WIDTH * 50)


def test_a_window_bounds_the_cache():
    block = make("window")
    for tokens in (2, 3, 40):
        _, state = block(torch.randn(1, tokens, WIDTH), return_state=True)
        assert state.k.shape[2] == min(tokens, 3)  # the next token is the fourth


def test_initial_values_follow_the_paper():
    torch.manual_seed(0)
    block = MambaBlock(64)
    delta = torch.nn.functional.softplus(block.dt_proj.bias)
    assert 1e-3 <= delta.min() < 2e-3 and 5e-2 < delta.max() <= 0.1001
    torch.testing.assert_close(block.A_log.exp()[7], torch.arange(1.0, 17))
    block = Mamba2Block(64)
    assert 1 <= block.A_log.exp().min() and block.A_log.exp().max() <= 16


@pytest.mark.parametrize(
    ("make_bad", "name"),
    [
        (lambda: MambaBlock(0), "d_model"),
        (lambda: MambaBlock(8, d_state=1.5), "d_state"),
        (lambda: MambaBlock(8, dt_rank=0), "dt_rank"),
        (lambda: Mamba2Block(8, head_dim=5), "head_dim"),
        (lambda: Mamba2Block(8, head_dim=4, groups=3), "groups"),
        (lambda: AttentionBlock(8, heads=3), "heads"),
        (lambda: AttentionBlock(8, heads=4, kv_heads=3), "kv_heads"),
        (lambda: AttentionBlock(8, heads=4, window=0), "window"),
        (lambda: HybridStack(8, []), "pattern"),
        (lambda: HybridStack(8, ["mamba", "lstm"]), "pattern"),
        (lambda: HybridStack(8, ["attention"]), "attention"),
        (lambda: make("mamba")(torch.zeros(2, 3, WIDTH + 1)), "x"),
        (lambda: make("mamba2").step(torch.zeros(2, 3, WIDTH), None), "x"),
        (lambda: causal_conv(torch.zeros(2, 3, 4), torch.zeros(2, 4)), "weight"),
        (lambda: causal_conv(torch.zeros(2, 3, 4), torch.zeros(3, 0)), "weight"),
        (lambda: causal_conv(
            torch.zeros(2, 3, 4), torch.zeros(3, 4),
            initial_state=torch.zeros(2, 3, 4)), "initial_state"),
    ],
)
def test_bad_arguments_are_named(make_bad, name):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        make_bad()
