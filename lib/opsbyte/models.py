"""Model architectures as lists of layers."""
from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta rule layer (arXiv 2412.06464) as in Qwen3-Next."""

    key_heads: int
    value_heads: int
    key_dim: int                   # per head
    value_dim: int                 # per head
    conv: int                      # width of the causal depthwise convolution


@dataclass(frozen=True)
class Mamba:
    """Mamba-1 block (arXiv 2312.00752)."""

    inner: int                     # expanded width, D
    state: int                     # N
    conv: int
    dt_rank: int
    norms: bool = False            # Jamba: RMSNorm on dt, B and C
    # add fields only where a catalogue model needs them


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 block (arXiv 2405.21060)."""

    heads: int
    head_dim: int                  # P
    state: int                     # N
    groups: int                    # G
    conv: int


@dataclass(frozen=True)
class MLP:
    width: int
    gated: bool = True             # gate, up, down; otherwise up, down
    bias: bool = False


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


Mixer = Attention | LatentAttention | GatedDeltaNet | Mamba | Mamba2


@dataclass(frozen=True)
class Layer:
    mixer: Mixer | None            # None: MLP only (Nemotron-H has such layers)
    mlp: MLP | MoE | None          # None: mixer only (Mamba)
    norms: int = 2                 # RMSNorms of d_model


@dataclass(frozen=True)
class ModelConfig:
    name: str
    d_model: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool = False             # one matrix is embedding and head
    max_tokens: int | None = None
    source: str = ""
    date: str = ""

    # parameters(), active_parameters(), cache_bytes(tokens, batch=1, dtype="bf16"),
    # from_hf(dict): see the brief
