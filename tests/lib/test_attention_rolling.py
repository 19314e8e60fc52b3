"""A rolling cache gives what a window over everything gives, in fixed memory."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opsbyte.attention import RollingKVCache, attention, flash_attention

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@given(st.lists(st.integers(0, 9) | st.just(1), max_size=12), st.integers(1, 7),
       st.integers(0, 4), st.sampled_from([(2, 2), (4, 2), (3, 1)]))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_any_chunks_equal_the_whole(chunks, window, sinks, heads):
    torch.manual_seed(sum(chunks))
    T = sum(chunks)
    q, k, v = torch.randn(2, heads[0], T, 3), *torch.randn(2, 2, heads[1], T, 3)
    options = {"window": window, "sinks": sinks}
    want = attention(q, k, v, **options)
    cache = RollingKVCache(window, sinks)
    for form in (attention, flash_attention):
        cache, outs = RollingKVCache(window, sinks), [q[:, :, :0]]
        for part in q.split(chunks, 2):
            new = slice(cache.length, cache.length + part.shape[2])
            seen = cache.append(k[:, :, new], v[:, :, new])
            outs.append(form(part, *seen, **options))
        torch.testing.assert_close(torch.cat(outs, 2), want, **CLOSE)
    assert cache.length == T
    kept = [p for p in range(T) if p < sinks or p >= T - window]
    assert cache.positions().tolist() == kept


def test_memory_is_fixed_and_one_token_copies_nothing():
    torch.manual_seed(0)
    cache = RollingKVCache(4, sinks=2)
    assert cache.nbytes == 0
    k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 3)
    places = set()
    for _ in range(20):
        seen_k, seen_v = cache.append(k, v)
        places.add((seen_k.data_ptr(), seen_v.data_ptr()))
        assert cache.nbytes == 2 * (4 + 2) * (8 + 3) * 4
    assert len(places) == 1 and seen_k.shape == (1, 2, 6, 8)


def test_what_has_left_the_window_is_gone():
    cache = RollingKVCache(3, sinks=1)
    k = torch.randn(1, 1, 8, 2)
    k[:, :, 1:4] = math.nan
    for t in range(8):
        seen, _ = cache.append(k[:, :, t : t + 1], k[:, :, t : t + 1])
    assert seen.isfinite().all()


def test_half_precision_stays():
    cache = RollingKVCache(3)
    x = torch.randn(1, 1, 5, 2).bfloat16()
    assert cache.append(x, x)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name, call", [
    ("window:", lambda: RollingKVCache(0)),
    ("sinks:", lambda: RollingKVCache(4, -1)),
    ("k:", lambda: RollingKVCache(4).append(torch.zeros(2, 3), torch.zeros(2, 3))),
    ("v:", lambda: RollingKVCache(4).append(
        torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 1, 3))),
    ("k:", lambda: filled().append(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))),
    ("k:", lambda: filled().append(*[torch.zeros(1, 1, 1, 3).half()] * 2)),
    ("v:", lambda: filled().append(torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 1, 4))),
])
def test_refuses(name, call):
    with pytest.raises(ValueError, match=f"^{name}"):
        call()


def filled():
    cache = RollingKVCache(4)
    cache.append(torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 1, 3))
    return cache
