"""Counted traffic equals the formulas, to the byte, and so does the cost model."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte import cost
from opsbyte.attention import (
    attention,
    attention_bytes,
    block_sizes,
    flash_attention,
    flash_bytes,
    paged_attention,
    paged_bytes,
    tile_bytes,
)
from opsbyte.models import MLP, Attention, Layer, ModelConfig
from opsbyte.traffic import Traffic

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def test_traffic_adds_up():
    traffic = Traffic()
    traffic.load(torch.zeros(3, 4), torch.zeros(10, dtype=torch.bfloat16))
    traffic.load(torch.zeros(100)[:5], 7)
    traffic.store(torch.zeros(2, dtype=torch.int64))
    assert (traffic.loaded, traffic.stored) == (48 + 20 + 20 + 7, 16)
    assert traffic.bytes == 111


@pytest.mark.parametrize("moved", [-1, 1.5, True, "x", None])
def test_traffic_refuses(moved):
    with pytest.raises(ValueError, match="traffic"):
        Traffic().load(moved)


@st.composite
def shapes(draw):
    kv_heads, causal = draw(st.integers(1, 2)), draw(st.booleans())
    shape = {
        "batch": draw(st.integers(1, 2)),
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "queries": draw(st.integers(0, 24)),
        "keys": draw(st.integers(0, 24)),
        "head_dim": draw(st.integers(1, 4)),
        "value_dim": draw(st.integers(1, 4)),
    }
    mask = {
        "causal": causal,
        "window": draw(st.none() | st.integers(1, 50)) if causal else None,
        "sinks": draw(st.integers(0, 12)),
    }
    return shape, mask, draw(st.sampled_from(DTYPES))


def tensors(shape, dtype):
    B, H, K, Tq, Tk, D, Dv = shape.values()
    sizes = (B, H, Tq, D), (B, K, Tk, D), (B, K, Tk, Dv)
    return [torch.zeros(size, dtype=dtype) for size in sizes]


@given(shapes())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_naive(problem):
    shape, mask, dtype = problem
    traffic = Traffic()
    attention(*tensors(shape, dtype), traffic=traffic, **mask)
    assert traffic.bytes == attention_bytes(itemsize=dtype.itemsize, **shape)


@given(shapes(), st.integers(1, 17), st.integers(1, 17), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=120)
def test_flash(problem, block_q, block_k, return_lse):
    shape, mask, dtype = problem
    how = {"block_q": block_q, "block_k": block_k, "return_lse": return_lse} | mask
    traffic = Traffic()
    flash_attention(*tensors(shape, dtype), traffic=traffic, **how)
    assert traffic.bytes == flash_bytes(itemsize=dtype.itemsize, **shape, **how)
    B, H, _, Tq, _, _, Dv = shape.values()
    lse = max(4, dtype.itemsize) if return_lse else 0
    assert traffic.stored == B * H * Tq * (Dv * dtype.itemsize + lse)


@pytest.mark.parametrize("fast_memory", [5_000, 20_000, 100_000, 2_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 127, 300, 512])
def test_flash_over_fast_memories(fast_memory, dtype, T):
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "queries": T, "keys": T + 13,
             "head_dim": 16, "value_dim": 16}
    block_q, block_k = block_sizes(fast_memory, head_dim=16, itemsize=dtype.itemsize)
    traffic = Traffic()
    blocks = {"block_q": block_q, "block_k": block_k}
    flash_attention(*tensors(shape, dtype), traffic=traffic, **blocks)
    assert traffic.bytes == flash_bytes(itemsize=dtype.itemsize, **shape, **blocks)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 9),
       st.sampled_from([2, 4]))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_flash_in_closed_form(d, n, b, itemsize):
    """N a multiple of the block b, n blocks: what the papers write."""
    N = n * b
    shape = {"batch": 1, "heads": 1, "kv_heads": 1, "queries": N, "keys": N,
             "head_dim": d, "itemsize": itemsize, "block_q": b, "block_k": b}
    once = 2 * N * d                                  # q and the result
    assert flash_bytes(causal=False, **shape) == itemsize * (once + 2 * N * d * n)
    assert flash_bytes(causal=True, **shape) == itemsize * (
        once + 2 * b * d * n * (n + 1) // 2)          # the lower triangle of tiles
    whole = shape | {"block_q": N, "block_k": N}
    assert flash_bytes(**whole) == itemsize * 4 * N * d


def test_naive_in_closed_form():
    """62.4 FLOPs a byte: N = 4096, d = 128, 16 bit, one head, no mask."""
    N, d = 4096, 128
    moved = attention_bytes(
        batch=1, heads=1, kv_heads=1, queries=N, keys=N, head_dim=d, itemsize=2)
    assert moved == 8 * N**2 + 8 * N * d
    assert round((4 * N**2 * d + 3 * N**2) / moved, 1) == 62.4


@given(st.integers(1, 128), st.integers(1, 128), st.sampled_from([2, 4, 8]),
       st.integers(100, 10**6))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_blocks_fill_the_fast_memory(head_dim, value_dim, itemsize, fast_memory):
    dims = {"head_dim": head_dim, "value_dim": value_dim, "itemsize": itemsize}
    try:
        block_q, block_k = block_sizes(fast_memory, **dims)
    except ValueError:
        assert tile_bytes(1, 1, **dims) > fast_memory
        return
    assert tile_bytes(block_q, block_k, **dims) <= fast_memory
    assert tile_bytes(block_q + 1, block_k, **dims) > fast_memory


def test_traffic_falls_as_one_over_the_fast_memory():
    """N²d²/M, the paper's theorem 2, where one load of the inputs is small."""
    N, d = 2**20, 64
    shape = {"batch": 1, "heads": 1, "kv_heads": 1, "queries": N, "keys": N,
             "head_dim": d, "causal": False}
    constants = []
    for M in (2**15, 2**17, 2**19):
        block_q, block_k = block_sizes(M, head_dim=d)
        moved = flash_bytes(**shape, block_q=block_q, block_k=block_k)
        constants.append(moved / (N**2 * d**2 / M))
    assert max(constants) < 2 * min(constants)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), min_size=1,
                max_size=3), st.integers(1, 6), st.integers(1, 9), st.integers(1, 20),
       shapes())
@settings(derandomize=True, deadline=None, max_examples=80)
def test_paged(lens, block_size, block_q, block_k, problem):
    shape, mask, dtype = problem
    queries, keys = zip(*lens, strict=True)
    H, K = shape["heads"], shape["kv_heads"]
    D, Dv = shape["head_dim"], shape["value_dim"]
    tables = torch.zeros(len(lens), 30 // block_size + 1, dtype=torch.int32)
    how = {"block_q": block_q, "block_k": block_k} | mask
    traffic = Traffic()
    paged_attention(
        torch.zeros(sum(queries), H, D, dtype=dtype),
        *(torch.zeros(1, block_size, K, dim, dtype=dtype) for dim in (D, Dv)),
        queries, keys, tables, traffic=traffic, **how,
    )
    assert traffic.bytes == paged_bytes(
        queries, keys, heads=H, kv_heads=K, head_dim=D, value_dim=Dv,
        itemsize=dtype.itemsize, block_size=block_size, index_size=4, **how)


def test_paged_decode_in_closed_form():
    """One query: the blocks in use, once, and 4 bytes to find each."""
    moved = paged_bytes([1, 1], [33, 16], heads=8, kv_heads=2, head_dim=64,
                        block_size=16, index_size=4)
    assert moved == 2 * 2 * (2 * 8 * 64 + 4 * 16 * 2 * 64) + 4 * 4


# --- the cost model ------------------------------------------------------------


def one_layer(heads, kv_heads, head_dim, window=None):
    mixer = Attention(heads, kv_heads, head_dim, window)
    return ModelConfig("one", heads * head_dim, 10, (Layer(mixer, MLP(8)),))


CASES = [(1, 0, 1), (64, 0, 1), (5, 40, 1), (1, 99, 3), (33, 0, 2)]


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("T, context, batch", CASES)
@pytest.mark.parametrize("dtype, itemsize", [("bf16", 2), ("fp32", 4)])
def test_cost_model_counts_the_same(kv_heads, T, context, batch, dtype, itemsize):
    model = one_layer(8, kv_heads, 16)
    shape = {"batch": batch, "heads": 8, "kv_heads": kv_heads, "queries": T,
             "keys": context + T, "head_dim": 16, "itemsize": itemsize}
    options = {"tokens": T, "batch": batch, "context": context, "dtype": dtype}
    unfused = cost.prefill(model, fused=False, **options)["attn.core"]
    assert unfused.bytes == attention_bytes(**shape)
    # A tile that holds all queries is what the cost model calls fused.
    fused = cost.prefill(model, **options)["attn.core"]
    assert fused.bytes == flash_bytes(**shape, block_q=T, block_k=1)


@pytest.mark.parametrize("window", [1, 8, 64, 500])
@pytest.mark.parametrize("T, context", [(1, 99), (16, 99), (30, 0)])
def test_cost_model_counts_the_same_window(window, T, context):
    fused = cost.prefill(one_layer(4, 2, 16, window), T, context=context)["attn.core"]
    assert fused.bytes == flash_bytes(
        batch=1, heads=4, kv_heads=2, queries=T, keys=context + T, head_dim=16,
        window=window, block_q=T, block_k=1)


def test_cost_model_counts_the_same_pages():
    """Full blocks: what is left is the 8 bytes that find each."""
    decode = cost.decode(one_layer(8, 2, 16), context=63, batch=3)["attn.core"]
    moved = paged_bytes([1] * 3, [64] * 3, heads=8, kv_heads=2, head_dim=16)
    assert moved - decode.bytes == 3 * 4 * 8
