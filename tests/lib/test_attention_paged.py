"""Paged attention equals attention on contiguous keys; the allocator keeps count."""
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.attention import (
    OutOfBlocks,
    PagedKVCache,
    attention,
    gathered_attention,
    paged_attention,
)

GOLDEN = Path(__file__).parents[1] / "golden"
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
FORMS = {
    "gathered": gathered_attention,
    "default": paged_attention,
    "small tiles": lambda *x, **o: paged_attention(*x, block_q=2, block_k=5, **o),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_golden(form):
    data = np.load(GOLDEN / "paged_attention.npz")
    pages = [torch.tensor(data[name]) for name in (
        "query", "key_cache", "value_cache", "query_lens", "kv_lens", "block_tables")]
    for name, window in (("out", None), ("out_window4", 4)):
        torch.testing.assert_close(
            form(*pages, window=window), torch.tensor(data[name]), **CLOSE
        )


def pages(sequences, block_size, *, spare=3, seed=0):
    """Scatter contiguous (k, v) of sequences over blocks in random order.

    Slots that belong to nobody hold NaN.
    """
    counts = [-(-k.shape[2] // block_size) for _, k, _ in sequences]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(sum(counts) + spare, generator=generator).tolist()
    k0, v0 = sequences[0][1:]
    caches = [
        torch.full((len(ids), block_size, x.shape[1], x.shape[3]), math.nan)
        for x in (k0, v0)
    ]
    tables = torch.zeros(len(sequences), max(counts) + 1, dtype=torch.int64)
    for row, n, (_, *kv) in zip(tables, counts, sequences, strict=True):
        row[:n] = torch.tensor([ids.pop() for _ in range(n)])
        for cache, x in zip(caches, kv, strict=True):
            for t, token in enumerate(x[0].transpose(0, 1)):
                cache[row[t // block_size], t % block_size] = token
    query = torch.cat([q[0].transpose(0, 1) for q, _, _ in sequences])
    lens = [[x.shape[2] for x in column] for column in zip(*sequences, strict=True)]
    return query, *caches, lens[0], lens[1], tables


@st.composite
def problems(draw):
    kv_heads = draw(st.integers(1, 2))
    heads, D, Dv = kv_heads * draw(st.integers(1, 3)), 3, draw(st.integers(1, 4))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    sequences = [
        (torch.randn(1, heads, Tq, D), *(
            torch.randn(1, kv_heads, Tk, d) for d in (D, Dv)))
        for Tq, Tk in draw(st.lists(
            st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=4))
    ]
    causal = draw(st.booleans())
    options = {
        "causal": causal,
        "window": draw(st.none() | st.integers(1, 24)) if causal else None,
        "sinks": draw(st.integers(0, 6)),
        "scale": draw(st.sampled_from([None, 0.7])),
    }
    return sequences, options


@given(problems(), st.integers(1, 7), st.integers(1, 7), st.integers(1, 20))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_equals_dense(problem, block_size, block_q, block_k):
    sequences, options = problem
    want = torch.cat([
        attention(*qkv, **options)[0].transpose(0, 1) for qkv in sequences
    ])
    packed = pages(sequences, block_size)
    torch.testing.assert_close(gathered_attention(*packed, **options), want, **CLOSE)
    out = paged_attention(*packed, block_q=block_q, block_k=block_k, **options)
    torch.testing.assert_close(out, want, **CLOSE)


def test_half_precision_and_int32_tables():
    torch.manual_seed(0)
    sequences = [tuple(torch.rand(1, 2, T, 16).bfloat16() for T in (4, 600, 600))]
    want = attention(*(x.double() for x in sequences[0]))[0].transpose(0, 1)
    *packed, tables = pages(sequences, 16)
    packed[1:3] = (x.bfloat16() for x in packed[1:3])
    out = paged_attention(*packed, tables.int(), block_k=32)
    assert out.dtype == torch.bfloat16
    assert ((out - want).abs() <= torch.finfo(out.dtype).eps / 2 * want * 1.01).all()


def good():
    sequences = [(torch.randn(1, 4, 2, 3), *torch.randn(2, 1, 2, 5, 3))] * 2
    names = "query", "key_cache", "value_cache", "query_lens", "kv_lens", "block_tables"
    return dict(zip(names, pages(sequences, 4), strict=True))


@pytest.mark.parametrize("name, change", [
    ("query:", {"query": torch.zeros(4, 3)}),
    ("query:", {"query": torch.zeros(4, 4, 5)}),
    ("query:", {"query": torch.zeros(4, 4, 3, dtype=int)}),
    ("q:", {"query": torch.zeros(4, 3, 3)}),
    ("key_cache:", {"key_cache": torch.zeros(7, 4, 3)}),
    ("key_cache:", {"key_cache": torch.zeros(7, 4, 2, 3).half()}),
    ("value_cache:", {"value_cache": torch.zeros(6, 4, 2, 3)}),
    ("query_lens:", {"query_lens": [2, 3]}),
    ("query_lens:", {"query_lens": [-1, 5]}),
    ("query_lens:", {"query_lens": [2.0, 2.0]}),
    ("kv_lens:", {"kv_lens": [5, 13]}),
    ("block_tables:", {"kv_lens": [5]}),
    ("block_tables:", {"block_tables": torch.zeros(2, 3)}),
    ("block_tables:", {"block_tables": torch.zeros(6, dtype=int)}),
    ("block_tables:", {"block_tables": torch.tensor([[0, 1, 0], [2, 7, 0]])}),
    ("block_tables:", {"block_tables": torch.tensor([[0, 1, 0], [2, -1, 0]])}),
    ("window:", {"window": 0}),
    ("block_q:", {"block_q": 0}),
    ("block_k:", {"block_k": None}),
    ("sinks:", {"sinks": -2}),
])
def test_refuses(name, change):
    paged_attention(**good())
    with pytest.raises(ValueError, match=f"^{name}"):
        paged_attention(**good() | change)


def test_entries_beyond_a_sequence_are_not_read():
    call = good()
    want = paged_attention(**call)
    call["block_tables"][:, 2:] = 99
    assert torch.equal(paged_attention(**call), want)


# --- the cache ---------------------------------------------------------------


def tokens(n, heads=2, dim=3):
    return torch.randn(n, heads, dim), torch.randn(n, heads, dim)


def held(cache, seq):
    """The sequence's keys and values, followed through its table."""
    length, table = cache.length(seq), list(cache.table(seq))
    return tuple(x[0][table].flatten(0, 1)[:length] for x in (cache.keys, cache.values))


def same(cache, seq, k, v):
    got_k, got_v = held(cache, seq)
    return torch.equal(got_k, k) and torch.equal(got_v, v)


def test_attention_through_the_cache():
    torch.manual_seed(0)
    cache = PagedKVCache(16, 4, 2, 3)
    want, seqs, queries = [], [], []
    for length, new in ((9, 1), (4, 4), (6, 3)):
        k, v = tokens(length)
        seqs.append(cache.add())
        cache.append(seqs[-1], k[: length - new], v[: length - new])
        cache.append(seqs[-1], k[length - new :], v[length - new :])
        queries.append(torch.randn(new, 4, 3))
        q, k, v = (x.transpose(0, 1)[None] for x in (queries[-1], k, v))
        want.append(attention(q, k, v)[0].transpose(0, 1))
    lens, tables = cache.batch(seqs)
    assert lens == [9, 4, 6]
    out = paged_attention(
        torch.cat(queries), cache.keys[0], cache.values[0], [1, 4, 3], lens, tables
    )
    torch.testing.assert_close(out, torch.cat(want), **CLOSE)


def test_blocks_come_one_at_a_time_and_go_back():
    cache = PagedKVCache(4, 2, 2, 3)
    seq = cache.add()
    assert cache.table(seq) == () and cache.free_blocks == 4
    for used in (1, 1, 2, 2, 3):
        cache.append(seq, *tokens(1))
        assert len(cache.table(seq)) == used and cache.free_blocks == 4 - used
    cache.free(seq)
    assert cache.free_blocks == 4 and cache.users == [0] * 4
    with pytest.raises(ValueError, match="^seq:"):
        cache.length(seq)


def test_fork_shares_and_copies_on_write():
    torch.manual_seed(0)
    cache = PagedKVCache(8, 4, 2, 3)
    parent = cache.add()
    k, v = tokens(6)
    cache.append(parent, k, v)
    child = cache.fork(parent)
    assert cache.table(child) == cache.table(parent) and cache.free_blocks == 6
    k1, v1 = tokens(1)
    cache.append(child, k1, v1)              # copies the half-full block only
    first, second = cache.table(parent)
    assert cache.table(child)[0] == first and cache.table(child)[1] != second
    assert cache.users[first] == 2 and cache.free_blocks == 5
    assert same(cache, parent, k, v)
    assert same(cache, child, torch.cat((k, k1)), torch.cat((v, v1)))
    cache.append(parent, k1 + 1, v1)         # alone again: no copy
    assert cache.table(parent) == (first, second) and cache.free_blocks == 5
    assert same(cache, child, torch.cat((k, k1)), torch.cat((v, v1)))
    cache.free(parent)
    assert same(cache, child, torch.cat((k, k1)), torch.cat((v, v1)))
    assert cache.free_blocks == 6


def test_fork_at_a_full_block_copies_nothing():
    cache = PagedKVCache(4, 4, 2, 3)
    parent = cache.add()
    cache.append(parent, *tokens(4))
    child = cache.fork(parent)
    cache.append(child, *tokens(1))
    assert cache.table(child)[0] == cache.table(parent)[0] and cache.free_blocks == 2


def test_out_of_blocks_changes_nothing():
    torch.manual_seed(0)
    cache = PagedKVCache(3, 4, 2, 3)
    parent = cache.add()
    k, v = tokens(6)
    cache.append(parent, k, v)
    child = cache.fork(parent)
    with pytest.raises(OutOfBlocks, match="want 2 blocks, 1 "):
        cache.append(child, *tokens(3))      # a copy and a new block
    assert cache.length(child) == 6 and cache.table(child) == cache.table(parent)
    assert cache.free_blocks == 1 and same(cache, child, k, v)
    cache.free(parent)                       # preempt one, the other goes on
    cache.append(child, *tokens(3))
    assert cache.length(child) == 9


def test_prefixes_are_found_until_their_blocks_are_reused():
    torch.manual_seed(0)
    cache = PagedKVCache(4, 2, 2, 3)
    prompt = [5, 6, 7, 8, 9]
    k, v = tokens(5)
    first = cache.add(prompt)
    assert cache.length(first) == 0
    cache.append(first, k, v)
    cache.commit(first, prompt)
    second = cache.add([5, 6, 7, 8, 1])
    assert cache.table(second) == cache.table(first)[:2] and cache.length(second) == 4
    third = cache.add([5, 6, 1, 8, 9])
    assert cache.length(third) == 2
    assert cache.length(cache.add([5, 6])) == 0       # one token is left to compute
    for seq in (first, second, third):
        cache.free(seq)
    assert cache.free_blocks == 4
    again = cache.add(prompt)                # freed, not forgotten
    assert cache.length(again) == 4 and cache.free_blocks == 2
    assert same(cache, again, k[:4], v[:4])
    cache.free(again)
    greedy = cache.add()
    cache.append(greedy, *tokens(7))         # takes all blocks
    cache.free(greedy)
    assert cache.length(cache.add(prompt)) == 0


def test_the_same_tokens_after_other_tokens_are_not_the_same_keys():
    cache = PagedKVCache(4, 2, 2, 3)
    for prompt in ([1, 2, 3, 4], [5, 6, 7, 8]):
        seq = cache.add()
        cache.append(seq, *tokens(4))
        cache.commit(seq, prompt)
    assert cache.length(cache.add([1, 2, 7, 8, 9])) == 2
    assert cache.length(cache.add([5, 6, 7, 8, 9])) == 4


def test_a_prefix_loses_its_end_first():
    cache = PagedKVCache(3, 2, 2, 3)
    seq = cache.add()
    cache.append(seq, *tokens(6))
    cache.commit(seq, [1, 2, 3, 4, 5, 6])
    cache.free(seq)
    cache.append(cache.add(), *tokens(2))
    assert cache.length(cache.add([1, 2, 3, 4, 5, 6, 7])) == 4


def test_layers_share_a_table():
    torch.manual_seed(0)
    cache = PagedKVCache(4, 2, 2, 3, layers=2, value_dim=5, dtype=torch.bfloat16)
    seq = cache.add()
    written = []
    for n in (3, 2):
        cache.extend(seq, n)
        for layer in range(2):
            k, v = torch.randn(n, 2, 3).bfloat16(), torch.randn(n, 2, 5).bfloat16()
            cache.write(seq, k, v, layer)
            written.append((layer, k, v))
    table = list(cache.table(seq))
    for layer in range(2):
        for x, i in ((cache.keys, 1), (cache.values, 2)):
            want = torch.cat([w[i] for w in written if w[0] == layer])
            assert torch.equal(x[layer][table].flatten(0, 1)[:5], want)
    child = cache.fork(seq)
    cache.extend(child, 1)                   # copies the last block in both layers
    for x in (cache.keys, cache.values):
        assert torch.equal(x[:, cache.table(child)[2], 0], x[:, cache.table(seq)[2], 0])


@given(st.lists(st.tuples(st.sampled_from("afxaa"), st.integers(0, 5),
                          st.integers(1, 7)), max_size=40))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_any_history_equals_plain_copies(history):
    """Append, fork and free at random; a dictionary of tensors says what is so."""
    torch.manual_seed(0)
    cache, plain = PagedKVCache(10, 3, 1, 2), {}
    for action, which, n in history:
        if action == "a" or not plain:
            seq = cache.add() if which >= len(plain) else list(plain)[which]
            k, v = tokens(n, 1, 2)
            plain.setdefault(seq, (k[:0], v[:0]))
            try:
                cache.append(seq, k, v)
                plain[seq] = tuple(map(torch.cat, zip(plain[seq], (k, v), strict=True)))
            except OutOfBlocks:
                pass
        elif action == "f":
            seq = list(plain)[which % len(plain)]
            plain[cache.fork(seq)] = plain[seq]
        else:
            seq = list(plain)[which % len(plain)]
            cache.free(seq)
            del plain[seq]
        assert all(same(cache, seq, *kv) for seq, kv in plain.items())
        tables = [block for seq in plain for block in cache.table(seq)]
        assert cache.users == [tables.count(block) for block in range(10)]
        assert cache.free_blocks == cache.users.count(0)


@pytest.mark.parametrize("name, call", [
    ("blocks:", lambda c: PagedKVCache(0, 4, 2, 3)),
    ("value_dim:", lambda c: PagedKVCache(4, 4, 2, 3, value_dim=0)),
    ("seq:", lambda c: c.extend(7, 1)),
    ("seq:", lambda c: c.fork(7)),
    ("seq:", lambda c: c.free(7)),
    ("tokens:", lambda c: c.extend(0, -1)),
    ("tokens:", lambda c: c.commit(0, [1, 2, 3])),
    ("k:", lambda c: c.write(0, *tokens(3))),
    ("v:", lambda c: c.write(0, tokens(2)[0], tokens(1)[1])),
    ("k:", lambda c: c.append(0, *tokens(1, heads=1))),
    ("v:", lambda c: c.append(0, tokens(2)[0], tokens(1)[1])),
    ("append:", lambda c: (d := PagedKVCache(4, 4, 2, 3, layers=2)).append(
        d.add(), *tokens(1))),
])
def test_cache_refuses(name, call):
    cache = PagedKVCache(4, 4, 2, 3)
    cache.append(cache.add(), *tokens(2))
    with pytest.raises(ValueError, match=f"^{name}"):
        call(cache)
    assert cache.length(0) == 2              # and nothing has changed
