"""Multi-head latent attention: cache one small vector, not keys and values.

DeepSeek-V2, arXiv 2405.04434, section 2.1; the golden data are DeepSeek-V3's.

Keys and values of all heads are linear maps of one latent, c = norm(W_a x) of a
few hundred numbers, so c is what is kept, plus one rotary key for all heads
(position cannot pass through the maps). Given these weights nothing is
approximated. The maps can be applied to the cache (as trained) or moved to the
other side of the products, "absorbed": the query goes into the latent space and
attends there like MQA with one wide head, and no key or value is ever made.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opsbyte.attention import _check
from opsbyte.attention.dense import attention


@dataclass
class LatentCache:
    """What is kept of the tokens so far; pass a new one to start a sequence.

    latent `(B, T, rank)`, normalised, and rotary `(B, T, rope)`, rotated.
    """

    latent: Tensor | None = None
    rotary: Tensor | None = None

    def __len__(self) -> int:
        """Tokens held."""
        return 0 if self.latent is None else self.latent.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes held: (rank + rope) numbers a token, whatever the heads."""
        held = (x for x in (self.latent, self.rotary) if x is not None)
        return sum(x.numel() * x.element_size() for x in held)

    def append(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns all tokens' latents and rotary keys."""
        if self.latent is not None:
            latent = torch.cat((self.latent, latent), 1)
            rotary = torch.cat((self.rotary, rotary), 1)
        self.latent, self.rotary = latent, rotary
        return latent, rotary


@dataclass
class LatentAttention:
    """One layer of latent attention. Weights are `(out, in)`.

    wq_a `(q_rank, d)`, q_norm `(q_rank,)`, wq_b `(heads·(nope + rope), q_rank)`;
    wkv_a `(kv_rank + rope, d)`, kv_norm `(kv_rank,)`,
    wkv_b `(heads·(nope + v), kv_rank)`; wo `(d, heads·v)`.

    Raises ValueError if they do not fit together.
    """

    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv_a: Tensor
    kv_norm: Tensor
    wkv_b: Tensor
    wo: Tensor
    n_heads: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _check.check_count("n_heads", self.n_heads)
        heads, rank, d = self.n_heads, self.kv_norm.shape[-1], self.wq_a.shape[-1]
        self.rope_dim = self.wkv_a.shape[0] - rank
        self.nope_dim = self.wq_b.shape[0] // heads - self.rope_dim
        self.v_dim = self.wkv_b.shape[0] // heads - self.nope_dim
        q_rank = self.q_norm.shape[-1]
        shapes = {
            "wq_a": (q_rank, d), "q_norm": (q_rank,), "kv_norm": (rank,),
            "wq_b": (heads * (self.nope_dim + self.rope_dim), q_rank),
            "wkv_a": (rank + self.rope_dim, d),
            "wkv_b": (heads * (self.nope_dim + self.v_dim), rank),
            "wo": (d, heads * self.v_dim),
        }
        for name, want in shapes.items():
            weight = getattr(self, name)
            if tuple(weight.shape) != want or min(want) < 1:
                raise ValueError(f"{name}: got {tuple(weight.shape)}, want {want}")
            _check.check_like(name, weight, self.wq_a)
        if self.rope_dim % 2 or self.rope_dim < 2:
            raise ValueError(f"wkv_a: got {self.rope_dim} rotary rows, want 2, 4, …")

    @classmethod
    def random(
        cls, *, d_model: int, n_heads: int, q_rank: int, kv_rank: int,
        nope_dim: int, rope_dim: int, v_dim: int, seed: int = 0,
    ) -> LatentAttention:
        """Weights of variance 1/in, for experiments; float32."""
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) / columns**0.5

        return cls(
            wq_a=weight(q_rank, d_model), q_norm=torch.ones(q_rank),
            wq_b=weight(n_heads * (nope_dim + rope_dim), q_rank),
            wkv_a=weight(kv_rank + rope_dim, d_model), kv_norm=torch.ones(kv_rank),
            wkv_b=weight(n_heads * (nope_dim + v_dim), kv_rank),
            wo=weight(d_model, n_heads * v_dim), n_heads=n_heads,
        )

    def __call__(
        self, x: Tensor, *, cache: LatentCache | None = None, absorb: bool = False
    ) -> Tensor:
        """Causal attention of x `(B, T, d)` after what `cache` holds: `(B, T, d)`.

        absorb: attend in the latent space (less to read in decode) or make keys
        and values first (less arithmetic in prefill). The answer is the same.
        """
        if x.dim() != 3 or x.shape[2] != self.wq_a.shape[1]:
            want = f"(batch, time, {self.wq_a.shape[1]})"
            raise ValueError(f"x: got {tuple(x.shape)}, want {want}")
        _check.check_like("x", x, self.wq_a)
        cache = LatentCache() if cache is None else cache
        start, rank = len(cache), self.kv_norm.shape[0]

        q = rms_norm(x @ self.wq_a.mT, self.q_norm, self.norm_eps) @ self.wq_b.mT
        q = q.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)   # (B, H, T, …)
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), -1)
        q_rope = rotate(q_rope, start, self.rope_theta)

        latent, rotary = (x @ self.wkv_a.mT).split((rank, self.rope_dim), -1)
        latent = rms_norm(latent, self.kv_norm, self.norm_eps)
        latent, rotary = cache.append(latent, rotate(rotary, start, self.rope_theta))

        attend = self._absorbed if absorb else self._unabsorbed
        out = attend(q_nope, q_rope, latent[:, None], rotary[:, None])
        return out.transpose(1, 2).flatten(2) @ self.wo.mT

    def _unabsorbed(self, q_nope, q_rope, latent, rotary) -> Tensor:
        """Make every head's keys and values from the latents; then MHA."""
        to_key, to_value = self._up()
        k_nope, v = latent @ to_key.mT, latent @ to_value.mT      # (B, H, T, …)
        rotary = rotary.expand(-1, self.n_heads, -1, -1)
        q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, rotary), -1)
        return attention(q, k, v, scale=self.scale)

    def _absorbed(self, q_nope, q_rope, latent, rotary) -> Tensor:
        """(q)ᵀ(W c) = (Wᵀ q)ᵀ c: bring the query to the latents; then MQA."""
        to_key, to_value = self._up()
        q = torch.cat((q_nope @ to_key, q_rope), -1)              # (B, H, T, rank + r)
        k = torch.cat((latent, rotary), -1)                       # (B, 1, T, rank + r)
        return attention(q, k, latent, scale=self.scale) @ to_value.mT

    def _up(self) -> tuple[Tensor, Tensor]:
        """wkv_b per head: to keys `(H, nope, rank)`, to values `(H, v, rank)`."""
        per_head = self.wkv_b.unflatten(0, (self.n_heads, -1))
        return per_head.split((self.nope_dim, self.v_dim), 1)

    @property
    def scale(self) -> float:
        """Of the scores: 1/sqrt of the unabsorbed head, in both forms."""
        return (self.nope_dim + self.rope_dim) ** -0.5


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over its root mean square, times weight; float32 inside."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def rotate(x: Tensor, start: int, theta: float) -> Tensor:
    """Rotary positions start, start + 1, … on `(…, T, dim)`: pairs (0, 1), (2, 3), …"""
    T, dim = x.shape[-2:]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    pair = torch.arange(0, dim, 2, dtype=wide, device=x.device)
    time = torch.arange(start, start + T, dtype=wide, device=x.device)
    angle = time[:, None] * theta ** (-pair / dim)                # (T, dim / 2)
    even, odd = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)
