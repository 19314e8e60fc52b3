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

from collections.abc import Iterable

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
    (−inf for a row that sees nothing), in float32 or, for it, float64.
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
    Dv)`. Returns out `(B, Hq, Tq, Dv)` and log-sum-exp `(B, Hq, Tq)`.
    """
    B, H, T, _ = q.shape
    groups = H // kv_heads
    rows = accumulator(group(q, kv_heads)) * scale            # (B, Hkv, G·T, D)
    positions = torch.arange(first, first + T, device=q.device).repeat(groups)
    m = rows.new_full(rows.shape[:3], torch.finfo(rows.dtype).min).unsqueeze(-1)
    l = torch.zeros_like(m)                                   # noqa: E741
    acc = rows.new_zeros(*rows.shape[:3], value_dim)

    for start, k, v in tiles:
        keys = torch.arange(start, start + k.shape[2], device=q.device)
        mask = visible(positions, keys, causal=causal, window=window, sinks=sinks)
        s = rows @ accumulator(k).mT                          # (B, Hkv, G·T, n)
        if mask is not None:
            s.masked_fill_(~mask, -torch.inf)
        # The maximum only guards against overflow: it cancels in the result,
        # so no gradient flows through it.
        m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        p = s.sub_(m_new).exp_()
        shrink = (m - m_new).exp_()
        l = l * shrink + p.sum(-1, keepdim=True)              # noqa: E741
        acc = acc * shrink + weigh(p, accumulator(v), mask)
        m = m_new
        if traffic is not None:
            traffic.load(k, v)

    out = acc / l.masked_fill(l == 0, 1)
    lse = m + l.log()                                         # log 0 is −inf
    return out.reshape(B, H, T, value_dim).to(q.dtype), lse.reshape(B, H, T)


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
    out = (share_a * out_a).where(share_a > 0, 0)
    out = out + (share_b * out_b).where(share_b > 0, 0)
    return out.to(out_a.dtype), m + total.log()
