"""Compressive memory and native sparse attention: golden data, loops, masks."""
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.attention import (
    CompressiveMemory,
    attention,
    compressed_attention,
    infini_attention,
    linear_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    selection_mask,
    sparse,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "native_sparse_attention.npz"
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def inputs(seed, B=1, H=4, Hkv=2, Tq=None, T=9, K=3, V=4, dtype=torch.float64):
    make = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T if Tq is None else Tq, K), (B, Hkv, T, K), (B, Hkv, T, V))
    normal = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
    return [x.to(dtype) for x in normal]


def gates_like(q, seed=0):
    make = torch.Generator().manual_seed(seed)
    gates = torch.rand(3, *q.shape[:3], generator=make, dtype=torch.float64)
    return tuple(gates.to(q.dtype))


def softmax_mean(query, keys, values):
    """One query over a list of keys, in float64; zeros over none."""
    if not len(keys):
        return torch.zeros(values.shape[-1], dtype=torch.float64), torch.zeros(0)
    weights = torch.softmax(keys @ query / math.sqrt(len(query)), 0)
    return weights @ values, weights


def nsa_loop(q, k, v, gates, *, block_size, block_count, window):
    """The definition, one query at a time: (compressed, selected, window, out)."""
    (B, H, Tq, _), (Hkv, T) = q.shape, k.shape[1:3]
    q, k, v, gates = q.double(), k.double(), v.double(), [g.double() for g in gates]
    parts = torch.zeros(3, B, H, Tq, v.shape[3], dtype=torch.float64)
    total = -(-T // block_size)
    for b in range(B):
        for g in range(Hkv):
            heads = range(g * H // Hkv, (g + 1) * H // Hkv)
            for i in range(Tq):
                at = T - Tq + i
                whole = (at + 1) // block_size
                pooled = [
                    x[b, g, : whole * block_size].unflatten(0, (whole, block_size))
                    .mean(1) for x in (k, v)
                ]
                rank = torch.zeros(total, dtype=torch.float64)
                for h in heads:
                    parts[0, b, h, i], weights = softmax_mean(q[b, h, i], *pooled)
                    rank[:whole] += weights
                own = at // block_size
                always = {0, own, max(own - 1, 0)}
                others = [c for c in range(whole) if c not in always]
                others.sort(key=lambda c, rank=rank: -rank[c])
                chosen = always | set(others[: block_count - len(always)])
                far = [t for t in range(at + 1) if t // block_size in chosen]
                near = list(range(max(0, at - window + 1), at + 1))
                for h in heads:
                    for part, seen in ((1, far), (2, near)):
                        parts[part, b, h, i], _ = softmax_mean(
                            q[b, h, i], k[b, g, seen], v[b, g, seen]
                        )
    return *parts, sum(g[..., None] * p for g, p in zip(gates, parts, strict=True))


def test_native_sparse_attention_golden():
    data = {name: torch.tensor(x) for name, x in np.load(GOLDEN).items()}
    q, k, v = data["q"], data["k"], data["v"]
    size, count = data["block_size"].item(), data["block_count"].item()
    out, weights = compressed_attention(q, k, v, block_size=size)
    torch.testing.assert_close(out, data["out_compressed"], **CLOSE)
    blocks = select_blocks(
        weights, queries=32, keys=32, kv_heads=1, block_size=size, block_count=count
    )
    want = data["selected_blocks"].transpose(1, 2)  # from (B, T, H, n)
    assert torch.equal(blocks.sort(-1)[0], want.sort(-1)[0])
    out = selected_attention(q, k, v, blocks, block_size=size)
    torch.testing.assert_close(out, data["out_selected"], **CLOSE)
    gates = [data[f"gate_{x}"] for x in ("compressed", "selected", "window")]
    out = native_sparse_attention(
        q, k, v, gates, block_size=size, block_count=count,
        window=data["window"].item(),
    )
    torch.testing.assert_close(out, data["out"], **CLOSE)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1 << 20), B=st.integers(1, 2), Hkv=st.integers(1, 2),
    groups=st.integers(1, 3), T=st.integers(1, 22), Tq=st.integers(0, 22),
    block_size=st.integers(1, 6), block_count=st.integers(3, 6),
    window=st.integers(1, 30),
)
def test_native_sparse_attention_is_the_loop(
    seed, B, Hkv, groups, T, Tq, block_size, block_count, window
):
    q, k, v = inputs(seed, B, Hkv * groups, Hkv, min(Tq, T), T)
    gates = gates_like(q, seed)
    sizes = {"block_size": block_size, "block_count": block_count}
    compressed, selected, _, want = nsa_loop(q, k, v, gates, **sizes, window=window)
    out, weights = compressed_attention(q, k, v, block_size=block_size)
    torch.testing.assert_close(out, compressed)
    blocks = select_blocks(
        weights, queries=q.shape[2], keys=T, kv_heads=Hkv, **sizes
    )
    out = selected_attention(q, k, v, blocks, block_size=block_size)
    torch.testing.assert_close(out, selected)
    out = native_sparse_attention(q, k, v, gates, **sizes, window=window)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("gathered", [1, 40, 1 << 20])
def test_gathering_is_masking(gathered, monkeypatch):
    """However few queries are gathered at once."""
    monkeypatch.setattr(sparse, "GATHERED", gathered)
    q, k, v = inputs(0, T=23)
    blocks = torch.stack([torch.randperm(6)[:3] for _ in range(2 * 23)])
    blocks = blocks.reshape(1, 2, 23, 3)
    blocks[..., 0] = torch.arange(23) // 4  # each sees at least itself
    blocks[..., 1:].masked_fill_(blocks[..., 1:] == blocks[..., :1], -1)
    mask = selection_mask(blocks, keys=23, block_size=4).repeat_interleave(2, 1)
    want = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    out = selected_attention(q, k, v, blocks, block_size=4)
    torch.testing.assert_close(out, want)


def test_selecting_every_block_is_full_attention():
    q, k, v = inputs(1, T=21)
    only = (torch.zeros(1, 4, 21).double(), torch.ones(1, 4, 21).double())
    out = native_sparse_attention(
        q, k, v, (only[0], only[1], only[0]), block_size=4, block_count=6, window=1
    )
    torch.testing.assert_close(out, attention(q, k, v))


def test_what_is_not_selected_does_not_leak():
    """NaN in a block that is neither selected, pooled nor near changes nothing."""
    q, k, v = inputs(2, H=2, Hkv=1, T=24)
    blocks = torch.tensor([0, 4, 5]).expand(1, 1, 24, 3).clone()
    blocks[:, :, :20] = -1
    blocks[:, :, :20, 0] = 0
    clean = selected_attention(q, k, v, blocks, block_size=4)
    for x in (k, v):
        x[:, :, 4:16] = torch.nan
        x[:, :, -1] = torch.nan    # the future, for all queries but the last
    dirty = selected_attention(q, k, v, blocks, block_size=4)
    assert torch.equal(clean[:, :, :-1], dirty[:, :, :-1])
    assert dirty[:, :, -1].isnan().all()
    out, _ = compressed_attention(q, k, v, block_size=4)
    assert out[:, :, :7].isfinite().all() and out[:, :, 7:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_native_sparse_attention_in_half_precision(dtype):
    q, k, v = inputs(3, T=40, K=8, dtype=dtype)
    gates = gates_like(q)
    sizes = {"block_size": 4, "block_count": 4, "window": 8}
    out = native_sparse_attention(q, k, v, gates, **sizes)
    assert out.dtype == dtype
    *_, want = nsa_loop(q, k, v, gates, **sizes)
    eps = torch.finfo(dtype).eps  # each branch is rounded, then their sum
    torch.testing.assert_close(out.double(), want, rtol=2 * eps, atol=3 * eps)


def test_native_sparse_attention_gradients():
    q, k, v = (x.requires_grad_() for x in inputs(4, H=2, Hkv=1, T=10))
    gates = [g.requires_grad_() for g in gates_like(q)]

    def f(q, k, v, *gates):
        return native_sparse_attention(
            q, k, v, gates, block_size=2, block_count=3, window=3
        )

    assert torch.autograd.gradcheck(f, (q, k, v, *gates), fast_mode=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_count": 2}, "block_count: got 2, want a whole number >= 3"),
        ({"block_size": 0}, "block_size: got 0"),
        ({"window": 0}, "window: got 0"),
        ({"gates": [torch.ones(1, 4, 8)] * 3}, r"gates\[0\]: got"),
        ({"k": torch.ones(1, 2, 8, 3).double()}, "v: got"),
        ({"q": torch.ones(1, 4, 9, 3)}, "k: got torch.float64"),
        ({"scale": math.inf}, "scale: got inf"),
    ],
)
def test_native_sparse_attention_errors(change, message):
    q, k, v = inputs(5)
    args = {"q": q, "k": k, "v": v, "gates": gates_like(q)} | change
    with pytest.raises(ValueError, match=message):
        native_sparse_attention(**args)


def test_more_queries_than_keys_is_an_error():
    q, k, v = inputs(5, Tq=10)
    with pytest.raises(ValueError, match="q: got 10 queries, want at most the 9 keys"):
        native_sparse_attention(q, k, v, gates_like(q))


# Compressive memory


def infini_loop(q, k, v, gate, *, segment, update):
    """Infini-attention, equations 3 to 10, a step and a head at a time."""
    (B, H, T, K), Hkv = q.shape, k.shape[1]
    out = torch.zeros(B, H, T, v.shape[3], dtype=torch.float64)

    def phi(x):
        return torch.where(x > 0, x + 1, x.exp())

    for b in range(B):
        for h in range(H):
            kh, vh = k[b, h // (H // Hkv)], v[b, h // (H // Hkv)]
            M, z = torch.zeros(K, v.shape[3]).double(), torch.zeros(K).double()
            share = 1 / (1 + (-gate[h]).exp())
            for start in range(0, T, segment):
                stop = min(start + segment, T)
                for t in range(start, stop):
                    local, _ = softmax_mean(
                        q[b, h, t], kh[start : t + 1], vh[start : t + 1]
                    )
                    key = phi(q[b, h, t])
                    memory = key @ M / (key @ z) if start else local
                    out[b, h, t] = share * memory + (1 - share) * local
                old_M, old_z = M.clone(), z.clone()
                for t in range(start, stop):
                    key, value = phi(kh[t]), vh[t]
                    if update == "delta" and start:
                        value = value - key @ old_M / (key @ old_z)
                    M, z = M + torch.outer(key, value), z + key
    return out


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1 << 20), B=st.integers(1, 2), Hkv=st.integers(1, 2),
    groups=st.integers(1, 2), T=st.integers(1, 18), segment=st.integers(1, 20),
    update=st.sampled_from(["linear", "delta"]), cut=st.integers(0, 4),
)
def test_infini_attention_is_the_loop_whole_and_in_stretches(
    seed, B, Hkv, groups, T, segment, update, cut
):
    q, k, v = inputs(seed, B, Hkv * groups, Hkv, T=T)
    gate = torch.linspace(-2, 2, Hkv * groups, dtype=torch.float64)
    want = infini_loop(q, k, v, gate, segment=segment, update=update)
    memory = CompressiveMemory(update=update)
    out = infini_attention(q, k, v, gate, segment=segment, memory=memory)
    torch.testing.assert_close(out, want)

    memory, outs = CompressiveMemory(update=update), []
    for part in (slice(0, cut * segment), slice(cut * segment, T)):
        tile = [x[:, :, part] for x in (q, k, v)]
        if tile[0].shape[2]:
            outs.append(infini_attention(*tile, gate, segment=segment, memory=memory))
    torch.testing.assert_close(torch.cat(outs, 2), want)


def test_the_linear_memory_is_the_state_of_linear_attention():
    q, k, v = inputs(6, T=30)
    memory = CompressiveMemory()
    for part in (slice(0, 11), slice(11, 30)):
        memory.write(k[:, :, part], v[:, :, part])
    out, state = linear_attention(q, k, v, return_state=True)
    torch.testing.assert_close(torch.cat((memory.matrix, memory.norm), -1), state)
    torch.testing.assert_close(memory.read(q[:, :, -1:]), out[:, :, -1:])


def test_the_memory_does_not_grow():
    _, k, v = inputs(7, T=8, dtype=torch.float32)
    memory = CompressiveMemory(update="delta")
    assert memory.bytes == 0
    for _ in range(3):
        memory.write(k, v)
        assert memory.bytes == 2 * 3 * (4 + 1) * 4  # heads, K, V + 1, bytes each


def test_delta_does_not_write_what_it_knows():
    """One key is known after a write: writing it again changes no answer."""
    _, k, v = inputs(8, T=1)
    updates = ("delta", "delta", "linear")
    once, twice, sums = (CompressiveMemory(update=update) for update in updates)
    for memory, times in ((once, 1), (twice, 2), (sums, 2)):
        for _ in range(times):
            memory.write(k, v)
    torch.testing.assert_close(twice.matrix, once.matrix)
    torch.testing.assert_close(sums.matrix, 2 * once.matrix)


@pytest.mark.parametrize("update", ["linear", "delta"])
def test_infini_attention_gradients(update):
    q, k, v = (x.requires_grad_() for x in inputs(9, H=2, T=6))
    gate = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def f(q, k, v, gate):
        memory = CompressiveMemory(update=update)
        return infini_attention(q, k, v, gate, segment=2, memory=memory)

    assert torch.autograd.gradcheck(f, (q, k, v, gate), fast_mode=True)


def test_infini_attention_in_half_precision():
    q, k, v = inputs(10, T=60, dtype=torch.bfloat16)
    memory = CompressiveMemory()
    out = infini_attention(q, k, v, torch.zeros(4), segment=16, memory=memory)
    args = (x.double() for x in (q, k, v))
    want = infini_loop(*args, torch.zeros(4).double(), segment=16, update="linear")
    assert out.dtype == torch.bfloat16 and memory.matrix.dtype == torch.float32
    eps = torch.finfo(torch.bfloat16).eps  # both answers are rounded, then mixed
    torch.testing.assert_close(out.double(), want, rtol=2 * eps, atol=3 * eps)


def test_compressive_memory_errors():
    q, k, v = inputs(11)
    with pytest.raises(ValueError, match="update: got 'sum'"):
        CompressiveMemory(update="sum")
    memory = CompressiveMemory()
    with pytest.raises(ValueError, match="memory: got a read before"):
        memory.read(q)
    memory.write(k, v)
    with pytest.raises(ValueError, match="k, v: got"):
        memory.write(k[:, :1], v[:, :1])
    with pytest.raises(ValueError, match="q: got"):
        memory.read(q[..., :2])
    with pytest.raises(ValueError, match="segment: got 0"):
        infini_attention(q, k, v, torch.zeros(4), segment=0)
    with pytest.raises(ValueError, match="gate: got"):
        infini_attention(q, k, v, torch.zeros(3), segment=4)
