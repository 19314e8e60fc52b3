"""Sliding-window cache: a ring of the last keys, and a few first ones.

A layer with a window of w never looks further back than w keys (Longformer,
arXiv 2004.05150; Mistral 7B, arXiv 2310.06825, section 2: the rolling buffer).
So position p can overwrite position p − w, and the cache stops growing. Models
that were not trained with a window need their first tokens too, on which heads
park the attention that they have no use for: attention sinks (Xiao et al. 2023,
arXiv 2309.17453).
"""
from __future__ import annotations

import torch
from torch import Tensor

from opsbyte.attention import _check


class RollingKVCache:
    """The last `window` keys and values, and the first `sinks`, of a batch.

        k, v = cache.append(k_new, v_new)
        out = attention(q_new, k, v, window=window, sinks=sinks)

    equals attention over everything ever appended, with that window and those
    sinks: for one new token or for many, in any mixture. Memory is fixed by the
    first append: `(B, Hkv, sinks + window, D)`. Keys are kept as they come, so
    rotate them by their own position first.
    """

    def __init__(self, window: int, sinks: int = 0) -> None:
        _check.check_count("window", window)
        _check.check_count("sinks", sinks, least=0)
        self.window, self.sinks = window, sinks
        self.length = 0                        # tokens appended so far
        self._keys = self._values = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k `(B, Hkv, T, D)`, v `(B, Hkv, T, Dv)`; returns what they can see.

        That is every key in the cache that a new token's query sees, then the
        new ones. For one token it is the cache itself, not a copy, in the
        order of the slots, which its answer does not depend on: do not change
        it, and use it before the next append.
        """
        self._check(k, v)
        if self._keys is None:
            slots = self.sinks + self.window
            self._keys = k.new_zeros(*k.shape[:2], slots, k.shape[3])
            self._values = v.new_zeros(*v.shape[:2], slots, v.shape[3])
        T = k.shape[2]
        if T != 1:
            old = self._slots(self.positions())
            seen = tuple(
                torch.cat((cache[:, :, old], new), 2)
                for cache, new in ((self._keys, k), (self._values, v))
            )
        new = torch.arange(self.length, self.length + T)
        keep = (new < self.sinks) | (new >= self.length + T - self.window)
        keep = keep.nonzero().flatten()
        slots = self._slots(new[keep])
        self._keys[:, :, slots] = k[:, :, keep]
        self._values[:, :, slots] = v[:, :, keep]
        self.length += T
        if T != 1:
            return seen
        full = min(self.length, self.sinks + self.window)
        return self._keys[:, :, :full], self._values[:, :, :full]

    def positions(self) -> Tensor:
        """Positions of the tokens in the cache, oldest first."""
        first = min(self.sinks, self.length)
        recent = max(first, self.length - self.window)
        return torch.cat((torch.arange(first), torch.arange(recent, self.length)))

    @property
    def nbytes(self) -> int:
        """Bytes held, 0 before the first append."""
        return 0 if self._keys is None else self._keys.nbytes + self._values.nbytes

    def _slots(self, positions: Tensor) -> Tensor:
        """Where positions are kept: sinks in front, then the ring."""
        ring = self.sinks + (positions - self.sinks) % self.window
        return torch.where(positions < self.sinks, positions, ring)

    def _check(self, k: Tensor, v: Tensor) -> None:
        _check.check_dims("k", k, "(batch, heads, time, dim)")
        _check.check_tensors(k, k, v)
        for name, new, cache in (("k", k, self._keys), ("v", v, self._values)):
            if cache is not None:
                _check.check_like(name, new, cache)
                if new.shape[:2] + new.shape[3:] != cache.shape[:2] + cache.shape[3:]:
                    raise ValueError(
                        f"{name}: got {tuple(new.shape)}, want the batch, heads and"
                        f" dimension of those before, {tuple(cache.shape)}"
                    )
