"""Diffusion transformers: their shapes, and what one denoising step costs.

A step runs the whole transformer on every token of the image or video, with
full attention and no cache: it is a prefill, repeated for every step. Three
kinds of block, all modulated by a vector made from the time step (adaLN):

    blocks   one stream (DiT, arXiv 2212.09748); with `cross`, also attention
             to the text (Wan, arXiv 2503.20314)
    double   image and text streams with their own weights that attend
             jointly (MMDiT, arXiv 2403.03206)
    single   the two streams joined, attention and MLP in parallel (FLUX.1)

The text encoder and the image decoder are other models and are not counted.
"""
from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources

from opsbyte.cost import ACT, NORM, ROPE, Cost, Operator, Pass, merge
from opsbyte.hardware import dtype_bytes, unknown

FREQUENCIES = 256      # sines and cosines that encode the time step


@dataclass(frozen=True)
class DiffusionTransformer:
    name: str
    d_model: int
    heads: int
    width: int                     # of the MLP
    channels: int                  # of the latent
    out_channels: int              # twice that if a variance is predicted
    patch: tuple[int, int, int]    # latent frames, rows, columns in a token
    stride: tuple[int, int, int]   # frames, rows, columns in a latent pixel
    blocks: int = 0
    double: int = 0
    single: int = 0
    cross: bool = False
    qk_norm: bool = False
    rope: bool = False
    shared_modulation: bool = False  # one projection for all blocks, not one each
    text_tokens: int = 0
    text_dim: int = 0
    text_ends: bool = False        # the last double block drops the text after it
    text_layers: int = 1           # products that bring the text to d_model
    vectors: tuple[int, ...] = (FREQUENCIES,)  # widths of what is embedded
    classes: int = 0               # rows of a table of labels
    positions: int = 0             # rows of a stored table of positions
    label: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    date: str = field(default="", compare=False)

    def tokens(self, height: int, width: int, frames: int = 1) -> int:
        """Tokens of an image or video. The first frame is a latent frame of
        its own, then every `stride[0]` frames make one.

        Raises ValueError if a side is not a multiple of stride times patch.
        """
        sides = {"height": (height, 1), "width": (width, 2)}
        count = ((frames - 1) // self.stride[0] + 1) // self.patch[0]
        if frames < 1 or (frames - 1) % self.stride[0]:
            raise ValueError(f"frames must be 1 more than a multiple of "
                             f"{self.stride[0]}, got {frames}")
        for name, (pixels, axis) in sides.items():
            unit = self.stride[axis] * self.patch[axis]
            if pixels < unit or pixels % unit:
                raise ValueError(
                    f"{name} must be a multiple of {unit}, got {pixels}")
            count *= pixels // unit
        return count

    def parameters(self) -> int:
        """Every weight, biases included, of the transformer."""
        d, patch = self.d_model, _product(self.patch)

        def linear(d_in, d_out):
            return d_in * d_out + d_out

        mlp = linear(d, self.width) + linear(self.width, d)
        attention = (linear(d, 3 * d) + linear(d, d)
                     + self.qk_norm * 2 * self._norm_width())
        modulation = 6 * d if self.shared_modulation else linear(d, 6 * d)
        stream = attention + mlp + modulation
        block = stream + self.cross * (attention + 2 * d)
        single = (linear(d, 3 * d + self.width) + linear(d + self.width, d)
                  + linear(d, 3 * d) + self.qk_norm * 2 * self._norm_width())
        unused = (linear(d, d) + mlp + linear(d, 4 * d)) if self.text_ends else 0
        text = (self.text_dim and linear(self.text_dim, d)
                + (self.text_layers - 1) * linear(d, d))
        vectors = sum(linear(v, d) + linear(d, d) for v in self.vectors)
        shared = linear(d, 6 * d) if self.shared_modulation else 0
        final = 2 * d if self.shared_modulation else linear(d, 2 * d)
        return (self.blocks * block + 2 * self.double * stream - unused
                + self.single * single + text + vectors + shared + final
                + linear(self.channels * patch, d)
                + linear(d, self.out_channels * patch)
                + (self.classes + self.positions) * d)

    def _norm_width(self) -> int:
        """Weights of the norm on q: per head, or over the whole width."""
        return self.d_model if self.cross else self.d_model // self.heads


def step(model: DiffusionTransformer, image_tokens: int, batch: int = 1, *,
         dtype: str = "bf16", weight_dtype: str | None = None,
         activation_dtype: str | None = None, fused: bool = True) -> Cost:
    """Cost of one denoising step of `batch` images of `image_tokens` tokens.

    Classifier-free guidance by two passes is a batch twice as large. Images
    with their own time steps are not distinguished: each has its own
    modulation, computed once.
    """
    for name, value in (("image_tokens", image_tokens), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    weight_dtype = weight_dtype or dtype
    a = dtype_bytes(activation_dtype or dtype)
    p = Pass(B=batch, T=image_tokens, S=0, d=model.d_model, a=a, c=a, s=a,
             w=dtype_bytes(weight_dtype), causal=False, fused=fused)
    text = replace(p, T=model.text_tokens)
    joint = replace(p, T=image_tokens + model.text_tokens)
    operators = list(_inputs(model, p, text))
    ends = int(model.text_ends)
    for times, block in ((model.blocks, _block(model, p, text)),
                         (model.double - ends, _double(model, p, text, joint)),
                         (ends, _double(model, p, text, joint, last=True)),
                         (model.single, _single(model, joint))):
        operators += [o * times for o in block if times]
    operators += _outputs(model, p)
    return Cost(merge(operators), dtype, weight_dtype)


def _inputs(m: DiffusionTransformer, p: Pass, text: Pass) -> Iterator[Operator]:
    d, patch = p.d, _product(m.patch)
    yield p.linear("patch", m.channels * patch, d, bias=True)
    for width in m.vectors:
        yield p.linear("time", width, d, n=p.B, bias=True)
        yield p.linear("time", d, d, n=p.B, bias=True)
    if m.shared_modulation:
        yield p.linear("time", d, 6 * d, n=p.B, bias=True)
    for i in range(m.text_layers if m.text_dim else 0):
        yield text.linear("text.in", d if i else m.text_dim, d, bias=True)


def _outputs(m: DiffusionTransformer, p: Pass) -> Iterator[Operator]:
    yield _modulation(m, p, "final.mod", 2)
    yield _norm(p, "final.norm")
    yield p.linear("final.out", p.d, m.out_channels * _product(m.patch), bias=True)


def _modulation(m: DiffusionTransformer, p: Pass, name: str,
                vectors: int) -> Operator:
    """adaLN: shift, scale and gate, from the time step's vector."""
    if m.shared_modulation:                    # a learned offset is added
        width = vectors * p.d
        return p.elementwise(name, p.B * width, p.B * width, p.B * width,
                             weights=width)
    return p.linear(name, p.d, vectors * p.d, n=p.B, bias=True)


def _norm(p: Pass, name: str) -> Operator:
    """Gate and add the last branch, normalise, shift and scale."""
    nd = p.n * p.d
    return p.elementwise(name, (NORM + 2) * nd, 2 * nd, 2 * nd)


def _rotate(m: DiffusionTransformer, p: Pass, name: str) -> Iterator[Operator]:
    """Norm and rotary positions of q and k, in one go."""
    if m.qk_norm or m.rope:
        nd = 2 * p.n * p.d
        yield p.elementwise(name, (m.rope * ROPE + m.qk_norm * (NORM - 1)) * nd,
                            nd, nd, weights=m.qk_norm * 2 * m._norm_width())


def _attend(m: DiffusionTransformer, p: Pass, name: str,
            keys: int) -> list[Operator]:
    """Full attention of the pass's tokens to `keys` tokens per image."""
    kv = p.B * keys * p.d * p.a
    return p.attend(name, m.heads, p.d // m.heads, p.d // m.heads,
                    keys=keys, pairs=p.T * keys, kv_bytes=(kv, kv), cached=False)


def _mlp(m: DiffusionTransformer, p: Pass, prefix: str) -> Iterator[Operator]:
    nF = p.n * m.width
    yield _norm(p, prefix + "mlp.norm")
    yield p.linear(prefix + "mlp.up", p.d, m.width, bias=True)
    yield p.elementwise(prefix + "mlp.act", ACT * nF, nF, nF)
    yield p.linear(prefix + "mlp.down", m.width, p.d, bias=True, reduce=True)


def _project(m: DiffusionTransformer, p: Pass, prefix: str,
             vectors: int = 6) -> Iterator[Operator]:
    yield _modulation(m, p, prefix + "attn.mod", vectors)
    yield _norm(p, prefix + "attn.norm")
    yield p.linear(prefix + "attn.qkv", p.d, 3 * p.d, bias=True)
    yield from _rotate(m, p, prefix + "attn.rope")


def _block(m: DiffusionTransformer, p: Pass, text: Pass) -> Iterator[Operator]:
    d = p.d
    yield from _project(m, p, "")
    yield from _attend(m, p, "attn.core", p.T)
    yield p.linear("attn.out", d, d, bias=True, reduce=True)
    if m.cross:
        yield p.elementwise("cross.norm", NORM * p.n * d, 2 * p.n * d, 2 * p.n * d,
                            weights=2 * d)
        yield p.linear("cross.q", d, d, bias=True)
        yield text.linear("cross.kv", d, 2 * d, bias=True)
        if m.qk_norm:
            nd = (p.n + text.n) * d
            yield p.elementwise("cross.rope", (NORM - 1) * nd, nd, nd, weights=2 * d)
        yield from _attend(m, p, "cross.core", m.text_tokens)
        yield p.linear("cross.out", d, d, bias=True, reduce=True)
    yield from _mlp(m, p, "")


def _double(m: DiffusionTransformer, p: Pass, text: Pass,
            joint: Pass, last: bool = False) -> Iterator[Operator]:
    for stream, prefix in ((p, ""), (text, "text.")):
        if last and stream is text:            # only its keys and values matter
            yield from _project(m, stream, prefix, vectors=2)
            continue
        yield from _project(m, stream, prefix)
        yield stream.linear(prefix + "attn.out", p.d, p.d, bias=True, reduce=True)
        yield from _mlp(m, stream, prefix)
    yield from _attend(m, joint, "attn.core", joint.T)


def _single(m: DiffusionTransformer, p: Pass) -> Iterator[Operator]:
    d, F = p.d, m.width
    yield _modulation(m, p, "single.mod", 3)
    yield _norm(p, "single.norm")
    yield p.linear("single.in", d, 3 * d + F, bias=True)
    yield from _rotate(m, p, "single.rope")
    yield from _attend(m, p, "single.core", p.T)
    yield p.elementwise("single.act", ACT * p.n * F, p.n * F, p.n * F)
    yield p.linear("single.out", d + F, d, bias=True, reduce=True)


def _product(sides: tuple[int, ...]) -> int:
    a, b, c = sides
    return a * b * c


@cache
def _catalogue() -> dict[str, DiffusionTransformer]:
    text = resources.files(__package__).joinpath("data/diffusion.toml").read_text(
        encoding="utf-8")
    return {name: DiffusionTransformer(name=name, **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in row.items()})
            for name, row in tomllib.loads(text).items()}


def model(name: str) -> DiffusionTransformer:
    """The catalogue's `name`. Raises ValueError with near matches."""
    known = _catalogue()
    if name not in known:
        raise ValueError(unknown("diffusion model", name, known))
    return known[name]


def models() -> tuple[DiffusionTransformer, ...]:
    """All diffusion transformers of the catalogue, in its order."""
    return tuple(_catalogue().values())
