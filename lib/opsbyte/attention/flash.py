"""FlashAttention: exact attention without the T×T matrix in slow memory.

Dao et al. 2022, arXiv 2205.14135; loop order as in FlashAttention-2, arXiv
2307.08691, algorithm 1. The online softmax is Milakov and Gimelshein's, arXiv
1805.02867.

A softmax needs its row's maximum m and its sum l. Both can be kept while keys
arrive in tiles: when a new tile raises m, what was summed so far shrinks by
exp(m_old − m_new). So a tile of queries visits the keys tile by tile and only
its answer leaves fast memory. Partial answers over different keys merge the
same way through their log-sum-exp, m + log l: that is split-K decoding.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from opsbyte.attention import _check
from opsbyte.attention.dense import accumulator, group, visible, weigh
from opsbyte.traffic import Traffic


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    block_q: int = 512,
    block_k: int = 512,
    return_lse: bool = False,
    traffic: Traffic | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention`, in tiles of `block_q` queries by `block_k` keys.

    Arguments, result and errors as `opsbyte.attention.attention`. Tiles of
    keys that no query of the tile sees are neither loaded nor computed.

    return_lse: also return the log-sum-exp `(B, Hq, Tq)` of the scaled scores
    (−inf for a row that sees nothing), float64 for float64, else float32.
    traffic: counts the tiles loaded and stored, as `flash_bytes` predicts.

    Gradients are right, but autograd keeps every tile; a real backward pass
    makes them again.
    """
    _check.check_tensors(q, k, v)
    _check.check_mask(causal, window, sinks)
    _check.check_count("block_q", block_q)
    _check.check_count("block_k", block_k)
    scale = _check.resolve_scale(scale, q.shape[-1])
    mask = {"causal": causal, "window": window, "sinks": sinks}
    Tq, Tk = q.shape[2], k.shape[2]
    outs, lses = [], []
    for start in range(0, Tq, block_q):
        rows = q[:, :, start : start + block_q]
        first = Tk - Tq + start                  # position of the first row
        tiles = [
            (j, k[:, :, j : j + block_k], v[:, :, j : j + block_k])
            for j in key_tiles(first, rows.shape[2], Tk, block_k, **mask)
        ]
        out, lse = online_softmax(
            rows, tiles, first=first, kv_heads=k.shape[1], value_dim=v.shape[3],
            scale=scale, traffic=traffic, **mask,
        )
        out = out.to(q.dtype)
        outs.append(out), lses.append(lse)
        if traffic is not None:
            traffic.load(rows), traffic.store(out)
            if return_lse:
                traffic.store(lse)
    if not outs:                                 # no query at all
        outs, lses = [q.new_zeros(*q.shape[:3], v.shape[3])], [accumulator(q)[..., 0]]
    out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
    return (out, lse) if return_lse else out


def online_softmax(
    q: Tensor,
    tiles: Iterable[tuple[int, Tensor, Tensor]],
    *,
    first: int,
    kv_heads: int,
    value_dim: int,
    scale: float,
    causal: bool,
    window: int | None,
    sinks: int,
    traffic: Traffic | None = None,
) -> tuple[Tensor, Tensor]:
    """One tile of queries over tiles of keys: the whole of FlashAttention.

    q `(B, Hq, Tq, D)` at positions `first`, `first` + 1, …; each tile is the
    position of its first key, keys `(B, Hkv, n, D)` and values `(B, Hkv, n,
    Dv)`. Returns out `(B, Hq, Tq, Dv)` and log-sum-exp `(B, Hq, Tq)`, both in
    the dtype that sums were kept in.
    """
    B, H, T, _ = q.shape
    groups = H // kv_heads
    # Powers of 2 are cheaper than powers of e: scores come in units of ln 2.
    rows = accumulator(group(q, kv_heads)) * (scale / math.log(2))
    m = rows.new_full(rows.shape[:3], torch.finfo(rows.dtype).min).unsqueeze(-1)
    l = torch.zeros_like(m)
    acc = rows.new_zeros(*rows.shape[:3], value_dim)

    for start, k, v in tiles:
        mask = visible(
            range(first, first + T), range(start, start + k.shape[2]),
            causal=causal, window=window, sinks=sinks, device=q.device,
        )
        s = rows @ accumulator(k).mT                          # (B, Hkv, G·T, n)
        if mask is not None:
            mask = mask.repeat(groups, 1)                     # (G·T, n)
            s.masked_fill_(~mask, -torch.inf)
        # The maximum only guards against overflow: it cancels in the result,
        # so no gradient flows through it.
        m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        p = s.sub_(m_new).exp2_()
        shrink = (m - m_new).exp2_()
        l = l * shrink + p.sum(-1, keepdim=True)
        acc = acc * shrink + weigh(p, accumulator(v), mask)
        m = m_new
        if traffic is not None:
            traffic.load(k, v)

    out = acc / l.masked_fill(l == 0, 1)
    lse = (m + l.log2()) * math.log(2)                        # log 0 is −inf
    return out.reshape(B, H, T, value_dim), lse.reshape(B, H, T)


def key_tiles(
    first: int, rows: int, keys: int, block_k: int,
    *, causal: bool, window: int | None, sinks: int,
) -> list[int]:
    """Starts of the key tiles that rows at `first`, `first` + 1, … can see."""
    stop = min(keys, first + rows) if causal else keys
    low = 0 if window is None else max(0, first - window + 1)
    return [
        j for j in range(0, stop, block_k) if j + block_k > low or j < sinks
    ]


def merge_partial_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from the attention over each.

    out `(B, H, T, D)` with lse `(B, H, T)`; or packed as serving engines keep
    it, out `(token, head, D)` with lse `(head, token)`. A side with lse −inf
    saw nothing and adds nothing, whatever its `out` holds; if neither saw
    anything the result is 0 with lse −inf. Returns (out, lse).
    Raises ValueError if the shapes do not fit.
    """
    packed = out_a.dim() == 3
    want = out_a.shape[-2::-1] if packed else out_a.shape[:-1]
    if out_a.dim() not in (3, 4) or out_b.shape != out_a.shape:
        raise ValueError(
            f"out_a, out_b: got {tuple(out_a.shape)} and {tuple(out_b.shape)}, want"
            " one shape, (batch, heads, time, dim) or (token, head, dim)"
        )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != want:
            raise ValueError(f"{name}: got {tuple(lse.shape)}, want {tuple(want)}")

    m = torch.maximum(lse_a, lse_b).clamp_min(torch.finfo(lse_a.dtype).min)
    w_a, w_b = (lse_a - m).exp(), (lse_b - m).exp()
    total = w_a + w_b
    share_a, share_b = (
        (w / total.masked_fill(total == 0, 1)).unsqueeze(-1) for w in (w_a, w_b)
    )
    if packed:
        share_a, share_b = share_a.transpose(0, 1), share_b.transpose(0, 1)
    out = (share_a * out_a).where(share_a != 0, 0)
    out = out + (share_b * out_b).where(share_b != 0, 0)
    return out.to(out_a.dtype), m + total.log()


def split_k_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    splits: int = 8,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` with the keys cut into `splits` parts, then merged.

    One query leaves a large machine idle when one tile after the other passes
    it. Independent parts can run at the same time (Flash-Decoding, Dao et al.
    2023). Arguments and result as `flash_attention`.
    """
    _check.check_tensors(q, k, v)
    _check.check_mask(causal, window, sinks)
    _check.check_count("splits", splits)
    Tq, Tk = q.shape[2], k.shape[2]
    scale = _check.resolve_scale(scale, q.shape[3])
    size = max(1, -(-Tk // splits))                       # keys in a part
    mask = {"causal": causal, "window": window, "sinks": sinks}
    parts = [
        online_softmax(
            q, [(j, k[:, :, j : j + size], v[:, :, j : j + size])],
            first=Tk - Tq, kv_heads=k.shape[1], value_dim=v.shape[3],
            scale=scale, **mask,
        )
        for j in key_tiles(Tk - Tq, Tq, Tk, size, **mask)
    ]
    if not parts:
        return flash_attention(q, k, v, scale=scale, return_lse=return_lse, **mask)
    out, lse = reduce(lambda a, b: merge_partial_attention(*a, *b), parts)
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out


def keys_loaded(
    queries: int, keys: int, *, block_q: int, block_k: int,
    causal: bool, window: int | None = None, sinks: int = 0, last: int | None = None,
) -> int:
    """Keys brought in for all tiles of queries, whole tiles of keys at a time.

    Without a mask, ⌈Tq / block_q⌉·Tk. With one, each tile of queries needs the
    keys from its first row's window to its last row, rounded out to tiles, and
    the tiles of the sinks. `last` is the last query's position, else the last
    key's.
    """
    last = keys - 1 if last is None else last
    total = 0
    for start in range(last - queries + 1, last + 1, block_q):
        seen = start + block_q if causal else keys
        high = max(0, min(keys, -(-seen // block_k) * block_k))
        low = 0 if window is None else max(0, start - window + 1) // block_k * block_k
        first_tiles = min(low, -(-sinks // block_k) * block_k)
        total += first_tiles + high - low
    return total


def flash_bytes(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    value_dim: int | None = None,
    itemsize: int = 2,
    block_q: int = 512,
    block_k: int = 512,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    return_lse: bool = False,
) -> int:
    """Bytes that `flash_attention` moves.

    Queries and results once, keys and values once for each tile of queries:
    with N queries and keys of dimension d, a head, 16 bit, no mask
    4 N d + 4 N d ⌈N / block_q⌉.
    """
    dims = head_dim + (head_dim if value_dim is None else value_dim)
    tokens = keys_loaded(
        queries, keys, block_q=block_q, block_k=block_k,
        causal=causal, window=window, sinks=sinks,
    )
    lse = heads * queries * max(4, itemsize) if return_lse else 0
    return batch * (itemsize * dims * (heads * queries + kv_heads * tokens) + lse)


def tile_bytes(
    block_q: int, block_k: int, *,
    head_dim: int, value_dim: int | None = None, itemsize: int = 2,
) -> int:
    """Fast memory that a head's tile needs: q, k, v; then scores, sums, result."""
    value_dim = head_dim if value_dim is None else value_dim
    inputs = block_q * head_dim + block_k * (head_dim + value_dim)
    sums = block_q * (block_k + value_dim + 2)
    return itemsize * inputs + max(4, itemsize) * sums


def block_sizes(
    fast_memory: int, *,
    head_dim: int, value_dim: int | None = None, itemsize: int = 2,
) -> tuple[int, int]:
    """`block_q` and `block_k` that fit in `fast_memory` bytes.

    Keys and values take at most a quarter, and no more rows than `head_dim`;
    the more queries fit in the rest, the less often the keys come again. Then
    traffic falls as N²d²/M, theorem 2 of the FlashAttention paper.
    Raises ValueError if not even one query fits.
    """
    dims = {"head_dim": head_dim, "value_dim": value_dim, "itemsize": itemsize}
    key_bytes = itemsize * (head_dim + (value_dim or head_dim))
    block_k = max(1, min(head_dim, fast_memory // (4 * key_bytes)))
    empty, one = (tile_bytes(n, block_k, **dims) for n in (0, 1))
    block_q = (fast_memory - empty) // (one - empty)
    if block_q < 1:
        raise ValueError(
            f"fast_memory: got {fast_memory} bytes, want at least {one} for one query"
        )
    return block_q, block_k
