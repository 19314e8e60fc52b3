"""Model architectures as lists of layers: what they hold and what they cache.

A `ModelConfig` is a tuple of `Layer`s; a layer is a mixer (attention of some
kind, or a recurrence) and an MLP (dense or a mixture of experts). Each part
counts its own parameters and its own state, so a hybrid is no special case.
The catalogue is `data/models.toml`; `ModelConfig.from_hf` reads the
`config.json` of the same families.
"""
from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from opsbyte.hardware import dtype_bytes, unknown


@dataclass(frozen=True)
class Attention:
    """Softmax attention: MHA, GQA or MQA by `kv_heads`, local by `window`."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None      # keys seen, the query's own included
    bias: bool = False             # biases on q, k, v
    output_bias: bool = False
    qk_norm: bool = False          # RMSNorm of head_dim on q and k
    output_gate: bool = False      # sigmoid gate: q projection twice as wide
    sinks: bool = False            # one learned logit per head (gpt-oss)

    def parameters(self, d_model: int) -> int:
        queries = self.heads * self.head_dim
        projected = (queries * (2 if self.output_gate else 1)
                     + 2 * self.kv_heads * self.head_dim)
        return (d_model * projected + self.bias * projected
                + queries * d_model + self.output_bias * d_model
                + self.qk_norm * 2 * self.head_dim + self.sinks * self.heads)

    def cache_elements(self, tokens: int) -> int:
        """Keys and values of the tokens that the next query can see."""
        held = tokens if self.window is None else min(tokens, self.window)
        return 2 * self.kv_heads * self.head_dim * held


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    def parameters(self, d_model: int) -> int:
        queries = self.heads * (self.nope_dim + self.rope_dim)
        if self.q_rank is None:
            q = d_model * queries
        else:                      # down, RMSNorm, up
            q = self.q_rank * (d_model + 1 + queries)
        kv = (d_model * (self.kv_rank + self.rope_dim) + self.kv_rank
              + self.kv_rank * self.heads * (self.nope_dim + self.v_dim))
        return q + kv + self.heads * self.v_dim * d_model

    def cache_elements(self, tokens: int) -> int:
        """The latent and the one rotary key that all heads share."""
        return (self.kv_rank + self.rope_dim) * tokens


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta rule layer (arXiv 2412.06464) as in Qwen3-Next."""

    key_heads: int
    value_heads: int
    key_dim: int                   # per head
    value_dim: int                 # per head
    conv: int                      # width of the causal depthwise convolution

    @property
    def conv_channels(self) -> int:
        """q, k and v go through the convolution; the gate z does not."""
        return (2 * self.key_heads * self.key_dim
                + self.value_heads * self.value_dim)

    def parameters(self, d_model: int) -> int:
        values = self.value_heads * self.value_dim
        into = d_model * (self.conv_channels + values + 2 * self.value_heads)
        small = 2 * self.value_heads + self.value_dim  # A, dt bias; gated norm
        return into + self.conv_channels * self.conv + small + values * d_model

    def state_elements(self) -> int:
        """One key_dim x value_dim matrix per value head."""
        return self.value_heads * self.key_dim * self.value_dim

    def conv_elements(self) -> int:
        return self.conv_channels * (self.conv - 1)


@dataclass(frozen=True)
class Mamba:
    """Mamba-1 block (arXiv 2312.00752)."""

    inner: int                     # expanded width, D
    state: int                     # N
    conv: int
    dt_rank: int
    norms: bool = False            # Jamba: RMSNorm on dt, B and C

    def parameters(self, d_model: int) -> int:
        narrow = self.dt_rank + 2 * self.state         # dt, B, C
        return (d_model * 2 * self.inner               # x and gate z
                + self.inner * (self.conv + 1)         # convolution, its bias
                + self.inner * narrow
                + (self.dt_rank + 1) * self.inner      # dt projection, its bias
                + self.inner * (self.state + 1)        # A, D
                + self.norms * narrow
                + self.inner * d_model)

    def state_elements(self) -> int:
        return self.inner * self.state

    def conv_elements(self) -> int:
        return self.inner * (self.conv - 1)


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 block (arXiv 2405.21060)."""

    heads: int
    head_dim: int                  # P
    state: int                     # N
    groups: int                    # G
    conv: int

    @property
    def inner(self) -> int:
        """Expanded width, heads x head_dim."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """x, B and C go through the convolution; the gate z and dt do not."""
        return self.inner + 2 * self.groups * self.state

    def parameters(self, d_model: int) -> int:
        return (d_model * (self.inner + self.conv_channels + self.heads)
                + self.conv_channels * (self.conv + 1)  # convolution, its bias
                + 3 * self.heads                        # A, D, dt bias
                + self.inner                            # gated RMSNorm
                + self.inner * d_model)

    def state_elements(self) -> int:
        return self.inner * self.state

    def conv_elements(self) -> int:
        return self.conv_channels * (self.conv - 1)


@dataclass(frozen=True)
class MLP:
    width: int
    gated: bool = True             # gate, up, down; otherwise up, down
    bias: bool = False

    def parameters(self, d_model: int) -> int:
        into = self.width * (2 if self.gated else 1)
        return d_model * (into + self.width) + self.bias * (into + d_model)

    active_parameters = parameters


@dataclass(frozen=True)
class MoE:
    width: int                     # of one expert
    experts: int
    active: int                    # routed experts per token
    shared_width: int = 0          # always-on expert(s), total width
    gated: bool = True
    bias: bool = False             # biases in experts and router (gpt-oss)
    router_bias: bool = False      # one correction per expert (DeepSeek-V3)
    shared_gate: bool = False      # a scalar gate on the shared expert (Qwen)

    def parameters(self, d_model: int) -> int:
        return self._with(self.experts, d_model)

    def active_parameters(self, d_model: int) -> int:
        """What one token uses: the router, its experts, the shared ones."""
        return self._with(self.active, d_model)

    def _with(self, experts: int, d_model: int) -> int:
        expert = MLP(self.width, self.gated, self.bias).parameters(d_model)
        router = self.experts * (d_model + self.bias + self.router_bias)
        shared = MLP(self.shared_width, self.gated).parameters(d_model)
        return experts * expert + router + shared + self.shared_gate * d_model


Mixer = Attention | LatentAttention | GatedDeltaNet | Mamba | Mamba2


@dataclass(frozen=True)
class Layer:
    mixer: Mixer | None            # None: MLP only (Nemotron-H has such layers)
    mlp: MLP | MoE | None          # None: mixer only (Mamba)
    norms: int = 2                 # RMSNorms of d_model


@dataclass(frozen=True)
class ModelConfig:
    """One architecture. Equality compares the architecture and the name."""

    name: str
    d_model: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool = False             # one matrix is embedding and head
    max_tokens: int | None = None
    source: str = field(default="", compare=False)
    date: str = field(default="", compare=False)
    label: str = field(default="", compare=False)    # "Llama 2 7B"
    notes: str = field(default="", compare=False)
    positions: int = 0             # rows of a learned position table (OPT)
    norm_bias: bool = False        # LayerNorm with bias instead of RMSNorm

    def parameters(self) -> int:
        """Every weight of the language model, embedding and head included."""
        mlps = (layer.mlp.parameters(self.d_model)
                for layer in self.layers if layer.mlp)
        return self._embedding() + self._shared() + sum(mlps)

    def active_parameters(self, *, embedding: bool = True) -> int:
        """The weights that one token meets: `active` experts, not all.

        Papers differ on the input embedding, of which a token reads one row:
        Mixtral's 12.9 B counts it, gpt-oss's 5.1 B does not. A tied matrix
        counts once either way, for it is also the head.
        """
        mlps = (layer.mlp.active_parameters(self.d_model)
                for layer in self.layers if layer.mlp)
        rows = self._embedding() if embedding or self.tied else 0
        return rows + self._shared() + sum(mlps)

    def _embedding(self) -> int:
        return self.vocab * self.d_model

    def _shared(self) -> int:
        """All but the input embedding and the MLPs."""
        norms = sum(layer.norms for layer in self.layers) + 1     # and the last
        mixers = sum(layer.mixer.parameters(self.d_model)
                     for layer in self.layers if layer.mixer)
        head = 0 if self.tied else self.vocab * self.d_model
        return (norms * self.d_model * (2 if self.norm_bias else 1)
                + mixers + head + self.positions * self.d_model)

    def cache_bytes(self, tokens: int, batch: int = 1, dtype: str = "bf16", *,
                    state_dtype: str = "fp32") -> int:
        """Bytes that `batch` sequences of `tokens` tokens keep between steps.

        What grows (keys and values up to the window, latents) and the last
        conv - 1 inputs of each convolution are stored in `dtype`. Recurrent
        states are stored in `state_dtype`: fp32 by default, as a state that
        is rounded at every token loses what it accumulates; some engines
        store 16 bits. Raises ValueError for negative counts or unknown dtypes.
        """
        for what, value in (("tokens", tokens), ("batch", batch)):
            if value < 0:
                raise ValueError(f"{what}: must be 0 or more, got {value}")
        mixers = [layer.mixer for layer in self.layers if layer.mixer]
        grows = sum(m.cache_elements(tokens) for m in mixers
                    if isinstance(m, Attention | LatentAttention))
        recurrent = [m for m in mixers
                     if isinstance(m, GatedDeltaNet | Mamba | Mamba2)]
        conv = sum(m.conv_elements() for m in recurrent)
        state = sum(m.state_elements() for m in recurrent)
        return math.ceil(batch * ((grows + conv) * dtype_bytes(dtype)
                                  + state * dtype_bytes(state_dtype)))

    @classmethod
    def from_hf(cls, config: dict, *, name: str | None = None) -> ModelConfig:
        """The architecture in a Hugging Face `config.json` (as a dict).

        Raises ValueError for a `model_type` it does not know, a missing key,
        an option that changes shapes in a way it does not cover, and any key
        that names a size and that it does not read. A key that is absent takes
        the default that the transformers library documents for that family.
        """
        from opsbyte import _hf  # only who reads a config.json pays for it

        return _hf.convert(config, name=name)


MIXERS = {"attention": Attention, "latent": LatentAttention,
          "delta": GatedDeltaNet, "mamba": Mamba, "mamba2": Mamba2}
MLPS = {"mlp": MLP, "moe": MoE}


@cache
def _catalogue() -> dict[str, dict]:
    text = resources.files(__package__).joinpath("data/models.toml").read_text(
        encoding="utf-8")
    return tomllib.loads(text)


def _from_table(name: str, table: dict) -> ModelConfig:
    """A model from its TOML table: `layer` names kinds, `pattern` orders them."""
    table = dict(table)
    kinds, depth = table.pop("layer"), table.pop("depth")
    common = kinds.get("every", {})
    built = {kind: _layer({key: _merge(common.get(key), own.get(key))
                           for key in {**common, **own}})
             for kind, own in kinds.items() if kind != "every"}
    order = _unfold(table.pop("pattern"))
    layers = tuple(built[order[i % len(order)]] for i in range(depth))
    return ModelConfig(name=name, layers=layers, **table)


def _merge(common, own):
    if isinstance(common, dict) and isinstance(own, dict):
        return common | own
    return common if own is None else own


def _unfold(pattern: str) -> list[str]:
    """"L5 G" -> L L L L L G. The stack repeats it until `depth` is reached."""
    return [word[0] for word in pattern.split() for _ in range(int(word[1:] or 1))]


def _layer(parts: dict) -> Layer:
    parts = dict(parts)
    mixer = [kind(**parts.pop(key)) for key, kind in MIXERS.items() if key in parts]
    mlp = [kind(**parts.pop(key)) for key, kind in MLPS.items() if key in parts]
    if len(mixer) > 1 or len(mlp) > 1:
        raise ValueError(f"layer: at most one mixer and one mlp, got {mixer + mlp}")
    return Layer(*(mixer or [None]), *(mlp or [None]), **parts)


@cache
def model(name: str) -> ModelConfig:
    """The catalogue's model called `name`. Raises ValueError, near matches."""
    known = _catalogue()
    if name not in known:
        raise ValueError(unknown("model", name, known))
    return _from_table(name, known[name])


def models() -> tuple[ModelConfig, ...]:
    """All models of the catalogue, in its order."""
    return tuple(model(name) for name in _catalogue())
