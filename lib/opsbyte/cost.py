"""What one pass of a model costs: FLOPs and bytes, operator by operator.

Symbols, the same as in the text:

    B batch             T tokens in the pass, per sequence     n = B T
    S context: tokens already in the cache, per sequence       d = d_model
    w, c, s, a          bytes per element of weights, cache, recurrent state,
                        activations

Counting rules. A multiply-add is 2 FLOPs. Bytes are those that must cross
between slow and fast memory: an operator reads its weights once, its inputs
once, and writes its outputs once, so the count is the least that any
implementation moves with these operators. Element-wise work is counted too,
with small stated constants (`SOFTMAX`, `NORM`, ...): it is negligible in
FLOPs and not in bytes.

What is taken as fused, as a good engine does it:
- q, k and v are one product; so are gate and up;
- a norm adds the block's output to the residual stream on its way;
- rope (and the norm of q and k) also writes k and v into the cache;
- attention with fused=True is flash attention: q, k, v are read, o is
  written, scores never leave fast memory (arXiv 2205.14135). fused=False
  writes the scores, reads and writes them in softmax, and reads them again;
- recurrences with fused=True keep their state in fast memory during the pass
  (arXiv 2312.00752, section 3.3.2). fused=False moves it at every token.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from opsbyte.hardware import dtype_bytes
from opsbyte.models import (
    MLP,
    Attention,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    Mamba,
    Mamba2,
    ModelConfig,
    MoE,
)

# FLOPs per element of the element-wise work.
SOFTMAX = 3     # per score: subtract the maximum, exponentiate, normalise
NORM = 5        # add to the residual, square, sum, scale, weight
ROPE = 3        # each pair: 4 multiplications and 2 additions
GATE = 5        # silu (negate, exp, add, divide) times the other half
ACT = 4         # an activation without a gate
SCAN = 7        # Mamba-1, per state element: exp(dA) 2, dBu 1, update 2, Ch 2
SSD = 5         # Mamba-2, per state element: decay 1, outer and add 2, read 2
DELTA = 7       # delta rule: decay 1, k'S 2, outer and add 2, q'S 2

LOGITS = ("last", "all", "none")


@dataclass(frozen=True)
class Operator:
    """One kind of operator; totals over its `count` launches.

    `reduce_bytes` is the part of the output that tensor parallelism has to
    sum over devices (attention's and the MLP's last product).
    """

    name: str
    flops: float
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    activation_bytes: float = 0.0
    count: int = 1
    reduce_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.cache_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def __mul__(self, times: int) -> Operator:
        return Operator(
            self.name, self.flops * times, self.weight_bytes * times,
            self.cache_bytes * times, self.activation_bytes * times,
            self.count * times, self.reduce_bytes * times)

    def __add__(self, other: Operator) -> Operator:
        return Operator(
            self.name, self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
            self.activation_bytes + other.activation_bytes,
            self.count + other.count, self.reduce_bytes + other.reduce_bytes)


@dataclass(frozen=True)
class Cost:
    """The operators of a pass. `a + b` is one pass after the other."""

    operators: tuple[Operator, ...]
    dtype: str = "bf16"            # what the products are computed in
    weight_dtype: str = "bf16"     # what the weights are stored in

    @property
    def flops(self) -> float:
        return sum(o.flops for o in self.operators)

    @property
    def weight_bytes(self) -> float:
        return sum(o.weight_bytes for o in self.operators)

    @property
    def cache_bytes(self) -> float:
        return sum(o.cache_bytes for o in self.operators)

    @property
    def activation_bytes(self) -> float:
        return sum(o.activation_bytes for o in self.operators)

    @property
    def bytes(self) -> float:
        return sum(o.bytes for o in self.operators)

    @property
    def launches(self) -> int:
        return sum(o.count for o in self.operators)

    @property
    def intensity(self) -> float:
        """FLOPs per byte of the whole. It does not give the time: a sum of
        maxima is not the maximum of the sums (see `roofline.time`)."""
        return self.flops / self.bytes

    def part(self, *names: str) -> Cost:
        """The operators called `names` or below: "attn" takes "attn.qkv".

        Raises ValueError on a name that matches nothing.
        """
        for name in names:
            if not any(_below(o.name, name) for o in self.operators):
                known = ", ".join(dict.fromkeys(o.name for o in self.operators))
                raise ValueError(f"no operator {name!r}; this cost has: {known}")
        return replace(self, operators=tuple(
            o for o in self.operators if any(_below(o.name, x) for x in names)))

    def __getitem__(self, name: str) -> Operator:
        """The total of the operators called `name` or below it."""
        first, *rest = self.part(name).operators
        for operator in rest:
            first = first + operator
        return replace(first, name=name)

    def __add__(self, other: Cost) -> Cost:
        mine, theirs = ((x.dtype, x.weight_dtype) for x in (self, other))
        if mine != theirs:
            raise ValueError(f"cannot add costs of dtypes {mine} and {theirs}")
        return replace(self, operators=self.operators + other.operators)


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def prefill(model: ModelConfig, tokens: int, batch: int = 1, *,
            dtype: str = "bf16", weight_dtype: str | None = None,
            cache_dtype: str | None = None, activation_dtype: str | None = None,
            context: int = 0, causal: bool = True, fused: bool = True,
            state_dtype: str = "fp32", absorb: bool | None = None,
            logits: str = "last") -> Cost:
    """Cost of one pass over `tokens` new tokens of each of `batch` sequences.

    dtype: what is multiplied; the other dtypes are what is stored, and
        default to it. Weight-only quantization: dtype="bf16",
        weight_dtype="int8".
    context: tokens already cached per sequence (a later chunk of a prefill).
    causal: count each query's visible keys exactly, windows included. False
        counts every key for every query, as older FLOP formulas do.
    fused: see the top of this file.
    state_dtype: recurrent states; their convolutions' inputs are cache_dtype.
    absorb: latent attention on the compressed cache (True), or after
        expanding it to keys and values (False); None takes the fewer FLOPs.
    logits: the head runs on the "last" token only, on "all", or on "none"
        (every chunk of a prefill but the last).

    Raises ValueError on sizes that are not positive or an unknown dtype.
    """
    for name, value, least in (("tokens", tokens, 1), ("batch", batch, 1),
                               ("context", context, 0)):
        if value < least or value != int(value):
            raise ValueError(
                f"{name} must be a whole number of at least {least}, got {value}")
    if logits not in LOGITS:
        raise ValueError(f"logits must be one of {LOGITS}, got {logits!r}")
    weight_dtype = weight_dtype or dtype
    dtype_bytes(dtype)
    p = Pass(B=batch, T=tokens, S=context, d=model.d_model,
              w=dtype_bytes(weight_dtype), c=dtype_bytes(cache_dtype or dtype),
              s=dtype_bytes(state_dtype), a=dtype_bytes(activation_dtype or dtype),
              affine=model.norm_bias, causal=causal, fused=fused, absorb=absorb)
    operators = [p.embed(tables=2 if model.positions else 1)]
    for layer, times in Counter(model.layers).items():
        operators += [operator * times for operator in p.layer(layer)]
    operators.append(p.norm("final.norm"))
    heads = {"last": batch, "all": p.n, "none": 0}[logits]
    if heads:
        operators.append(p.linear("head", p.d, model.vocab, n=heads))
    return Cost(merge(operators), dtype, weight_dtype)


def decode(model: ModelConfig, context: int, batch: int = 1, *,
           width: int = 1, **options) -> Cost:
    """Cost of one decode step with `context` tokens cached per sequence.

    width: tokens fed at once per sequence, each with its logits: 1, or the
    draft and one more when a step verifies speculated tokens. The options are
    those of `prefill`: decode(S) is prefill(1, context=S).
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    return prefill(model, width, batch, context=context, logits="all", **options)


def diffusion_step(model, image_tokens: int, batch: int = 1, **options) -> Cost:
    """Cost of one denoising step: see `opsbyte.diffusion.step` (built on this)."""
    from opsbyte.diffusion import step

    return step(model, image_tokens, batch, **options)


def memory(model: ModelConfig, tokens: int, batch: int = 1, *,
           dtype: str = "bf16", weight_dtype: str | None = None,
           cache_dtype: str | None = None) -> float:
    """Bytes held while serving: all weights, and the cache of `tokens` tokens
    of `batch` sequences. Working space is not counted."""
    return (model.parameters() * dtype_bytes(weight_dtype or dtype)
            + model.cache_bytes(tokens, batch, cache_dtype or dtype))


def visible_pairs(T: int, S: int = 0, *, window: int | None = None,
                  causal: bool = True) -> int:
    """(query, key) pairs of T queries after S cached tokens, per head.

    Causal: query i (from 0) sees the last min(S + i + 1, window) tokens.
    Otherwise every query counts min(S + T, window) keys.
    """
    w = S + T if window is None else min(window, S + T)
    if not causal:
        return T * w
    growing = min(max(w - S, 0), T)      # queries that see fewer than w keys
    return growing * S + growing * (growing + 1) // 2 + (T - growing) * w


def keys_read(T: int, S: int = 0, *, window: int | None = None) -> int:
    """Distinct keys that T queries after S cached tokens look at."""
    return S + T if window is None else min(S + T, T + window - 1)


def experts_touched(experts: int, active: int, tokens: int) -> float:
    """Expected number of distinct experts that `tokens` tokens use.

    E (1 - (1 - k/E)^n): each token picks k of E, uniformly and independently.
    Real routing is less even, so this is an upper estimate of the bytes.
    """
    return experts * (1 - (1 - active / experts) ** tokens)


def merge(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    merged: dict[str, Operator] = {}
    for o in operators:
        merged[o.name] = merged[o.name] + o if o.name in merged else o
    return tuple(merged.values())


@dataclass(frozen=True)
class Pass:
    """The symbols of one pass, and a method for each kind of layer."""

    B: int
    T: int
    S: int
    d: int
    w: float
    c: float
    s: float
    a: float
    affine: bool = False           # norms have a bias
    causal: bool = True
    fused: bool = True
    absorb: bool | None = None

    @property
    def n(self) -> int:
        """Tokens in the pass, all sequences together."""
        return self.B * self.T

    # ---- building blocks ------------------------------------------------

    def linear(self, name: str, d_in: int, d_out: int, *, n: int | None = None,
               bias: bool | int = False, reduce: bool = False) -> Operator:
        """n tokens through a (d_in, d_out) matrix: 2 n d_in d_out FLOPs."""
        n = self.n if n is None else n
        return Operator(
            name, flops=2 * n * d_in * d_out,
            weight_bytes=(d_in * d_out + bias * d_out) * self.w,
            activation_bytes=n * (d_in + d_out) * self.a,
            reduce_bytes=n * d_out * self.a if reduce else 0.0)

    def elementwise(self, name: str, flops: float, read: float, written: float,
                    *, weights: float = 0, cache: float = 0) -> Operator:
        """Elements read, written, of weights, and of the cache."""
        return Operator(name, flops, weights * self.w, cache * self.c,
                        (read + written) * self.a)

    def norm(self, name: str) -> Operator:
        """Read the residual stream and what to add; write the sum, its norm."""
        nd = self.n * self.d
        return self.elementwise(name, NORM * nd, 2 * nd, 2 * nd,
                                weights=self.d * (1 + self.affine))

    def embed(self, tables: int) -> Operator:
        """A row per token: of the vocabulary's table, and of the positions'."""
        nd = self.n * self.d
        return self.elementwise("embed", (tables - 1) * nd, 0, nd,
                                weights=tables * nd)

    def attend(self, name: str, heads: int, q_dim: int, v_dim: int, *,
               keys: int, pairs: int, kv_bytes: tuple[float, float],
               cached: bool = True, weights: float = 0) -> list[Operator]:
        """softmax(q k') v for `heads` query heads over `keys` keys a sequence.

        2 q_dim + SOFTMAX + 2 v_dim FLOPs per head and pair, of `pairs` a
        sequence. `kv_bytes`: the keys' and the values', in the cache or not.
        """
        pairs *= self.B * heads
        q, o = self.n * heads * q_dim, self.n * heads * v_dim
        k_bytes, v_bytes = kv_bytes

        def operator(suffix, flops, elements, kv=0.0):
            return Operator(name + suffix, flops,
                            cache_bytes=kv if cached else 0.0,
                            activation_bytes=elements * self.a
                            + (0.0 if cached else kv))

        if self.fused:
            core = operator("", pairs * (2 * q_dim + SOFTMAX + 2 * v_dim),
                            q + o, k_bytes + v_bytes)
            return [replace(core, weight_bytes=weights * self.w)]
        scores = self.n * heads * keys
        softmax = operator(".softmax", SOFTMAX * pairs, 2 * scores)
        return [
            operator(".scores", 2 * q_dim * pairs, q + scores, k_bytes),
            replace(softmax, weight_bytes=weights * self.w),
            operator(".values", 2 * v_dim * pairs, scores + o, v_bytes)]

    # ---- a layer --------------------------------------------------------

    def layer(self, layer: Layer) -> Iterator[Operator]:
        norms = layer.norms
        if layer.mixer is not None:
            prefix, operators = self.mixer(layer.mixer)
            share = -(-norms // 2) if layer.mlp is not None else norms
            norms -= share
            yield from [self.norm(prefix + ".norm")] * share
            yield from operators
        if layer.mlp is not None:
            moe = isinstance(layer.mlp, MoE)
            yield from [self.norm("moe.norm" if moe else "mlp.norm")] * norms
            yield from self.moe(layer.mlp) if moe else self.mlp(layer.mlp)

    def mixer(self, mixer) -> tuple[str, list[Operator]]:
        kinds = {Attention: ("attn", self.attention),
                 LatentAttention: ("attn", self.latent),
                 GatedDeltaNet: ("delta", self.delta),
                 Mamba: ("ssm", self.mamba), Mamba2: ("ssm", self.mamba2)}
        prefix, method = kinds[type(mixer)]
        return prefix, method(mixer)

    def attention(self, m: Attention) -> list[Operator]:
        n, d, H, K, D = self.n, self.d, m.heads, m.kv_heads, m.head_dim
        q_width = H * D * (2 if m.output_gate else 1)
        pairs = visible_pairs(self.T, self.S, window=m.window, causal=self.causal)
        keys = keys_read(self.T, self.S, window=m.window)
        kv_bytes = self.B * keys * K * D * self.c        # keys; values as many
        rotated = n * (H + K) * D
        operators = [
            self.linear("attn.qkv", d, q_width + 2 * K * D, bias=m.bias),
            self.elementwise(
                "attn.rope", (ROPE + (NORM - 1) * m.qk_norm) * rotated,
                read=n * (H + 2 * K) * D, written=n * H * D,
                cache=2 * n * K * D, weights=2 * D * m.qk_norm),
            *self.attend(
                "attn.core" + (".window" if m.window else ""), H, D, D,
                keys=keys, pairs=pairs, kv_bytes=(kv_bytes, kv_bytes),
                weights=H * m.sinks)]
        if m.output_gate:
            operators.append(self.elementwise(
                "attn.gate", GATE * n * H * D, 2 * n * H * D, n * H * D))
        operators.append(self.linear(
            "attn.out", H * D, d, bias=m.output_bias, reduce=True))
        return operators

    def latent(self, m: LatentAttention) -> list[Operator]:
        """Both forms of arXiv 2405.04434, section 2.1.

        Plain: expand latents to per-head keys and values, the cached ones
        too, then attend with nope + rope and v dimensions. Absorbed: move the
        query into the latent space, attend there as one shared key of
        kv_rank + rope and value of kv_rank, and come back.
        """
        if self.absorb is None:
            forms = [replace(self, absorb=x).latent(m) for x in (False, True)]
            return min(forms, key=lambda ops: sum(o.flops for o in ops))
        n, d, H, r = self.n, self.d, m.heads, m.kv_rank
        q_width, cached = H * (m.nope_dim + m.rope_dim), r + m.rope_dim
        q_rank = m.q_rank or 0
        keys = self.S + self.T
        pairs = visible_pairs(self.T, self.S, causal=self.causal)
        operators = [self.linear("attn.qkv_down", d, (q_rank or q_width) + cached)]
        if q_rank:
            operators.append(self.linear("attn.q_up", q_rank, q_width))
        turned = n * (H + 1) * m.rope_dim
        operators.append(self.elementwise(
            "attn.rope", ROPE * turned + (NORM - 1) * n * (q_rank + r),
            read=turned + n * (q_rank + r), written=n * (H * m.rope_dim + q_rank),
            cache=n * cached, weights=q_rank + r))
        if self.absorb:
            operators += [
                self.per_head("attn.absorb", H, m.nope_dim, r),
                *self.attend("attn.core", H, cached, r, keys=keys, pairs=pairs,
                             kv_bytes=(self.B * keys * cached * self.c, 0.0)),
                self.per_head("attn.expand", H, r, m.v_dim)]
        else:
            up = H * (m.nope_dim + m.v_dim)
            rows = self.B * keys
            k, v = rows * q_width * self.a, rows * H * m.v_dim * self.a
            operators += [
                Operator("attn.kv_up", 2 * rows * r * up, r * up * self.w,
                         rows * cached * self.c, rows * up * self.a),
                *self.attend("attn.core", H, m.nope_dim + m.rope_dim, m.v_dim,
                             keys=keys, pairs=pairs, cached=False,
                             kv_bytes=(k, v))]
        operators.append(self.linear("attn.out", H * m.v_dim, d, reduce=True))
        return operators

    def per_head(self, name: str, H: int, d_in: int, d_out: int) -> Operator:
        """A (d_in, d_out) matrix of its own for each of H heads."""
        return Operator(name, 2 * self.n * H * d_in * d_out,
                        H * d_in * d_out * self.w,
                        activation_bytes=self.n * H * (d_in + d_out) * self.a)

    # ---- recurrent mixers ------------------------------------------------

    def recurrence(self, name: str, flops: float, state_bytes: float, *,
                   inputs: int, outputs: int, weights: float) -> Operator:
        """A state per sequence that is read and written once a pass (fused)
        or once a token; `inputs` and `outputs` are elements per token."""
        moves = 2 * self.B * (1 if self.fused else self.T)
        return Operator(name, flops, weights * self.w, moves * state_bytes,
                        self.n * (inputs + outputs) * self.a)

    def conv(self, name: str, m: GatedDeltaNet | Mamba | Mamba2, channels: int,
             *, bias: bool) -> Operator:
        """Causal depthwise convolution; its last conv - 1 inputs are state."""
        return self.recurrence(
            name, self.n * channels * (2 * m.conv + ACT),
            m.conv_elements() * self.c, inputs=channels, outputs=channels,
            weights=channels * (m.conv + bias))

    def delta(self, m: GatedDeltaNet) -> list[Operator]:
        """Gated delta rule, recurrent form (arXiv 2412.06464, equation 10)."""
        n, d = self.n, self.d
        qkv, v, H = m.conv_channels, m.value_heads * m.value_dim, m.value_heads
        state = m.state_elements()
        return [
            self.linear("delta.in", d, qkv + v + 2 * H),
            self.conv("delta.conv", m, qkv, bias=False),
            self.recurrence("delta.core", DELTA * n * state, state * self.s,
                            inputs=qkv + 2 * H, outputs=v, weights=2 * H),
            self.elementwise("delta.gate", (NORM - 1 + GATE) * n * v, 2 * n * v,
                             n * v, weights=m.value_dim),
            self.linear("delta.out", v, d, reduce=True)]

    def mamba(self, m: Mamba) -> list[Operator]:
        """Selective scan (arXiv 2312.00752, algorithm 2)."""
        n, d, D, N, R = self.n, self.d, m.inner, m.state, m.dt_rank
        norms = ([self.elementwise("ssm.norms", (NORM - 1) * n * (R + 2 * N),
                                   n * (R + 2 * N), n * (R + 2 * N),
                                   weights=R + 2 * N)] if m.norms else [])
        return [
            self.linear("ssm.in", d, 2 * D),
            self.conv("ssm.conv", m, D, bias=True),
            self.linear("ssm.x", D, R + 2 * N),
            *norms,
            self.linear("ssm.dt", R, D, bias=True),
            self.recurrence("ssm.scan", n * D * (SCAN * N + GATE + 2),
                            m.state_elements() * self.s, inputs=3 * D + 2 * N,
                            outputs=D, weights=D * N + D),
            self.linear("ssm.out", D, d, reduce=True)]

    def mamba2(self, m: Mamba2) -> list[Operator]:
        """State space duality, recurrent form (arXiv 2405.21060, section 6)."""
        n, d, H, N, D, xbc = (
            self.n, self.d, m.heads, m.state, m.inner, m.conv_channels)
        return [
            self.linear("ssm.in", d, D + xbc + H),
            self.conv("ssm.conv", m, xbc, bias=True),
            self.recurrence("ssm.scan", n * D * (SSD * N + 2),
                            m.state_elements() * self.s, inputs=xbc + H,
                            outputs=D, weights=3 * H),
            self.elementwise("ssm.gate", (NORM - 1 + GATE) * n * D, 2 * n * D,
                             n * D, weights=D),
            self.linear("ssm.out", D, d, reduce=True)]

    # ---- feed-forward ------------------------------------------------------

    def mlp(self, m: MLP, prefix: str = "mlp") -> list[Operator]:
        n, d, F, up = self.n, self.d, m.width, 2 if m.gated else 1
        return [
            self.linear(prefix + ".up", d, up * F, bias=m.bias),
            self.elementwise(prefix + ".act", (GATE if m.gated else ACT) * n * F,
                             up * n * F, n * F),
            self.linear(prefix + ".down", F, d, bias=m.bias, reduce=True)]

    def moe(self, m: MoE) -> list[Operator]:
        """FLOPs of the k experts each token uses, bytes of the experts that
        all n tokens together touch (expected)."""
        n, d, F, E, k = self.n, self.d, m.width, m.experts, m.active
        up = 2 if m.gated else 1
        touched = experts_touched(E, k, n)

        def experts(name, d_in, d_out):
            return Operator(
                name, 2 * n * k * d_in * d_out,
                touched * (d_in * d_out + m.bias * d_out) * self.w,
                activation_bytes=n * k * (d_in + d_out) * self.a)

        router = self.linear("moe.router", d, E, bias=m.bias + m.router_bias)
        combine = self.elementwise("moe.combine", 2 * n * k * d, n * k * d, n * d)
        operators = [
            router, experts("moe.up", d, up * F),
            self.elementwise("moe.act", (GATE if m.gated else ACT) * n * k * F,
                             up * n * k * F, n * k * F),
            experts("moe.down", F, d),
            replace(combine, reduce_bytes=n * d * self.a)]
        if m.shared_width:
            up_, act, down = self.mlp(MLP(m.shared_width, m.gated), "moe.shared")
            if m.shared_gate:
                up_ = up_ + self.linear("", d, 1)
                up_ = replace(up_, count=1)
            # summed with the routed experts' output before the reduction
            operators += [up_, act, replace(down, reduce_bytes=0.0)]
        return operators
