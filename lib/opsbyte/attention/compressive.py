"""Compressive memory: a window of softmax attention, a matrix for all before it.

Infini-attention, Munkhdalai et al. 2024, arXiv 2404.07143, under "Compressive Memory".

The text comes in segments. Within one, softmax attention. What leaves is not
kept but added to a matrix M, as linear attention does (φ = elu + 1), and read by
later segments; a learned gate per head mixes the two answers:

    read    φ(Q) M / φ(Q) z
    write   M += φ(K)ᵀ V,  z += Σ φ(k)                   "linear"
            M += φ(K)ᵀ (V − φ(K) M / φ(K) z)             "delta": only what is new
"""
from __future__ import annotations

import torch
from torch import Tensor

from opsbyte.attention import _check
from opsbyte.attention._recurrence import check_gate, check_recurrent
from opsbyte.attention.dense import accumulator, attention, group
from opsbyte.attention.linear import FEATURE_MAPS

UPDATES = ("linear", "delta")


class CompressiveMemory:
    """An associative memory of K·(V + 1) numbers a head, however much it was told.

    matrix `(B, Hkv, K, V)` and norm `(B, Hkv, K, 1)` are None until the first
    write, then float32 (float64 for float64 input).

    update: "linear" adds every value, "delta" its difference from what the
    memory already answers. Raises ValueError on another name.
    """

    def __init__(self, *, update: str = "linear") -> None:
        if update not in UPDATES:
            raise ValueError(f"update: got {update!r}, want {' or '.join(UPDATES)}")
        self.update = update
        self.matrix: Tensor | None = None
        self.norm: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes held: they do not grow with what was written."""
        held = (x for x in (self.matrix, self.norm) if x is not None)
        return sum(x.numel() * x.element_size() for x in held)

    def read(self, q: Tensor) -> Tensor:
        """What the memory answers to q `(B, Hq, T, K)`: `(B, Hq, T, V)`.

        Raises ValueError before the first write, or if q does not fit it.
        """
        if self.matrix is None:
            raise ValueError("memory: got a read before the first write")
        B, heads, K, V = self.matrix.shape
        fits = q.dim() == 4 and (q.shape[0], q.shape[3]) == (B, K)
        if not fits or q.shape[1] % heads:
            raise ValueError(
                f"q: got {tuple(q.shape)}, want ({B}, a multiple of {heads}, T, {K})"
            )
        answer = self._recall(_features(group(q, heads)))
        return answer.reshape(*q.shape[:3], V).to(q.dtype)

    def write(self, k: Tensor, v: Tensor) -> None:
        """Add keys `(B, Hkv, T, K)` and their values `(B, Hkv, T, V)`."""
        _check.check_tensors(k, k, v)
        key, value = _features(k), accumulator(v)
        if self.matrix is None:
            self.matrix = value.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
            self.norm = value.new_zeros(*k.shape[:2], k.shape[3], 1)
        want = (*self.matrix.shape[:2], *self.matrix.shape[2:])
        if (*k.shape[:2], k.shape[3], v.shape[3]) != want:
            raise ValueError(
                f"k, v: got {tuple(k.shape)}, {tuple(v.shape)}, want a memory of {want}"
            )
        if self.update == "delta":
            value = value - self._recall(key)
        self.matrix = self.matrix + key.mT @ value
        self.norm = self.norm + key.sum(2).unsqueeze(-1)

    def _recall(self, features: Tensor) -> Tensor:
        """M and z read with φ already applied; nothing known answers zero."""
        weight = features @ self.norm
        nothing = weight == 0
        answer = features @ self.matrix / weight.masked_fill(nothing, 1)
        return answer.masked_fill(nothing, 0)


def infini_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    *,
    segment: int,
    memory: CompressiveMemory | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax within segments, compressive memory for all the segments before.

    q `(B, Hq, T, K)`, k `(B, Hkv, T, K)`, v `(B, Hkv, T, V)`; returns
    `(B, Hq, T, V)` in q's dtype.

    gate: `(Hq,)`; its sigmoid is the share of the memory's answer in a head. The
        very first segment has no memory and is softmax attention alone.
    segment: how many steps attend to each other.
    memory: continued and updated in place, so calls over stretches of whole
        segments equal one call; a new "linear" one by default.
    scale: of the softmax scores, 1/sqrt(K) by default.

    Raises ValueError on shapes, dtypes, devices or sizes that do not fit.
    """
    check_recurrent(q, k, v)
    _check.check_count("segment", segment)
    check_gate("gate", gate, q, ((q.shape[1],),))
    memory = CompressiveMemory() if memory is None else memory
    share = torch.sigmoid(accumulator(gate))[:, None, None]
    outs = []
    for Q, K, V in zip(*(x.split(segment, 2) for x in (q, k, v)), strict=True):
        out = accumulator(attention(Q, K, V, scale=scale))
        if memory.matrix is not None:
            out = share * accumulator(memory.read(Q)) + (1 - share) * out
        memory.write(K, V)
        outs.append(out)
    return torch.cat(outs, 2).to(q.dtype)


def _features(x: Tensor) -> Tensor:
    return FEATURE_MAPS["elu+1"](accumulator(x))
