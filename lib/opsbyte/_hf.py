"""From a Hugging Face `config.json` to a `ModelConfig`, one function a family.

Nothing is guessed. A key that the transformers library gives a default takes
that default, written here beside the key; any other missing key, an option
that changes shapes in a way not covered, and a key that names a size and that
no rule here has read, are errors. Keys about positions, dropout, token ids,
quantization and multi-token prediction change no shape of the main model.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from opsbyte.hardware import unknown
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

# A key like this names a size, a count or a kind of weight.
SIZE = re.compile(
    r"(^|_)(size|dim|heads?|layers?|experts?|rank|width|bias|window|pattern|expand"
    r"|groups|qk|kernel|state|vocab|intermediate|hidden|tie|channels|inner|n|d)(_|$)")
# These match, and change no shape of the main model.
HARMLESS = {
    "hidden_dropout_prob", "max_window_layers", "chunk_size", "mamba_chunk_size",
    "output_hidden_states", "pad_vocab_size_multiple", "num_nextn_predict_layers",
    "n_group", "n_ctx", "n_positions", "qk_head_dim", "mamba_dt_rank", "ep_size",
    "mamba_inner_layernorms",
}
HARMLESS_ENDS = ("_act", "_epsilon", "_activation", "_token_id", "_coef", "_dropout",
                 "_index")


class _Config:
    """A config.json that remembers which keys were read. null counts as absent."""

    def __init__(self, config: dict):
        self.config, self.read = config, set()

    def take(self, key: str, default):
        """The value of `key`, or the default that transformers documents."""
        self.read.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def need(self, key: str):
        value = self.take(key, None)
        if value is None:
            raise ValueError(f"config: required key {key!r} is missing")
        return value

    def only(self, key: str, default, *allowed) -> None:
        """Refuses every value of `key` but the default and `allowed`."""
        value = self.take(key, default)
        if value not in (default, *allowed):
            raise ValueError(f"config: {key} = {value!r} is not supported here;"
                             f" allowed: {[default, *allowed]}")

    def refuse_unread(self) -> None:
        strange = sorted(
            key for key, value in self.config.items()
            if key not in self.read | HARMLESS and SIZE.search(key)
            and not key.endswith(HARMLESS_ENDS) and value is not None)
        if strange:
            raise ValueError(f"config: no rule for {', '.join(strange)}, which may"
                             " change shapes; refusing to guess")


def convert(config: dict, *, name: str | None = None) -> ModelConfig:
    """See `ModelConfig.from_hf`."""
    if not isinstance(config, dict):
        raise ValueError(f"config: a dict (json.load of config.json), got"
                         f" {type(config).__name__}")
    if "model_type" not in config and "ssm_cfg" in config:
        family, build = "mamba_ssm", _mamba_ssm
    else:
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(unknown("config: model_type", family, FAMILIES))
        build = FAMILIES[family]
    c = _Config(config)
    for key in ("model_type", "architectures", "max_position_embeddings"):
        c.read.add(key)
    fields = build(c)
    c.refuse_unread()
    return ModelConfig(**{"name": name or family, "source": "config.json"} | fields)


def _common(c: _Config, layers: Iterable[Layer], *, tied: bool) -> dict:
    """What every family has. `tied` is the family's documented default."""
    layers = tuple(layers)
    if len(layers) != c.need("num_hidden_layers"):
        raise ValueError(f"config: num_hidden_layers = {c.need('num_hidden_layers')},"
                         f" but the pattern has {len(layers)}")
    return {"d_model": c.need("hidden_size"), "vocab": c.need("vocab_size"),
            "layers": layers, "tied": c.take("tie_word_embeddings", tied),
            "max_tokens": c.take("max_position_embeddings", None)}


def _attention(c: _Config, *, grouped: bool = True, own_dim: bool = False,
               **more) -> Attention:
    """`grouped`: num_key_value_heads must be there, else it defaults to the query
    heads. `own_dim`: head_dim must be there, else it defaults to d_model / heads.
    """
    heads, d_model = c.need("num_attention_heads"), c.need("hidden_size")
    if heads < 1:
        raise ValueError(f"config: num_attention_heads must be positive, got {heads}")
    kv_heads = (c.need("num_key_value_heads") if grouped
                else c.take("num_key_value_heads", heads))
    head_dim = c.need("head_dim") if own_dim else c.take("head_dim", d_model / heads)
    if head_dim != int(head_dim) or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"config: hidden_size {d_model}, num_attention_heads {heads}"
                         f" and num_key_value_heads {kv_heads} do not divide evenly")
    return Attention(heads, kv_heads, int(head_dim), **more)


def _windows(c: _Config, default: Callable[[int], bool], size) -> list[int | None]:
    """The window of each layer: from `layer_types`, else by the family's rule."""
    depth = c.need("num_hidden_layers")
    rule = ["sliding_attention" if default(i) else "full_attention"
            for i in range(depth)]
    return [size() if kind == "sliding_attention" else None
            for kind in _kinds(c, rule, {"sliding_attention", "full_attention"})]


def _kinds(c: _Config, default: list[str], allowed: set[str]) -> list[str]:
    kinds = c.take("layer_types", default)
    if strange := set(kinds) - allowed:
        raise ValueError(f"config: layer_types has {sorted(strange)};"
                         f" allowed: {sorted(allowed)}")
    return kinds


def _repeat(c: _Config, layer: Layer) -> list[Layer]:
    return [layer] * c.need("num_hidden_layers")


def _mlp(c: _Config, *, bias: bool = False) -> MLP:
    return MLP(c.need("intermediate_size"), bias=bias)


# ------------------------------------------------------------------ transformers


def _llama(c: _Config) -> dict:
    bias = c.take("attention_bias", False)
    mixer = _attention(c, grouped=False, bias=bias, output_bias=bias)
    mlp = _mlp(c, bias=c.take("mlp_bias", False))
    return _common(c, _repeat(c, Layer(mixer, mlp)), tied=False)


def _mistral(c: _Config) -> dict:
    # transformers: an absent sliding_window means 4096, null means none.
    c.read.add("sliding_window")
    window = c.config.get("sliding_window", 4096)
    mixer = _attention(c, window=window)
    return _common(c, _repeat(c, Layer(mixer, _mlp(c))), tied=False)


def _mixtral(c: _Config) -> dict:
    mixer = _attention(c, window=c.take("sliding_window", None))
    moe = MoE(c.need("intermediate_size"), c.need("num_local_experts"),
              c.need("num_experts_per_tok"))
    return _common(c, _repeat(c, Layer(mixer, moe)), tied=False)


def _qwen2(c: _Config) -> dict:
    return _qwen_dense(c, own_dim=False, bias=True)


def _qwen3(c: _Config) -> dict:
    bias = c.take("attention_bias", False)
    return _qwen_dense(c, own_dim=True, bias=bias, output_bias=bias, qk_norm=True)


def _qwen_dense(c: _Config, *, own_dim: bool, **more) -> dict:
    """Layers from `max_window_layers` on are local, if windows are used at all."""
    local = c.take("use_sliding_window", False)
    c.read.add("sliding_window")
    windows = _windows(c, lambda i: local and i >= c.need("max_window_layers"),
                       lambda: c.need("sliding_window"))
    mlp = _mlp(c)
    layers = [Layer(_attention(c, own_dim=own_dim, window=window,
                               **more), mlp) for window in windows]
    return _common(c, layers, tied=False)


def _gemma3(c: _Config) -> dict:
    """The language model inside a Gemma 3 that also sees; the rest is left out."""
    text = c.need("text_config")
    if text.get("model_type") not in (None, "gemma3_text"):
        raise ValueError(f"config: text_config.model_type {text['model_type']!r};"
                         " allowed: 'gemma3_text'")
    inner = _Config(text)
    inner.read |= {"model_type", "max_position_embeddings"}
    fields = _gemma3_text(inner)
    inner.refuse_unread()
    if "tie_word_embeddings" in c.config:
        fields["tied"] = c.need("tie_word_embeddings")
    # What transformers and the tokenizer repeat at the top level.
    c.read |= {"hidden_size", "num_hidden_layers", "num_attention_heads",
               "num_key_value_heads", "vocab_size", "head_dim", "sliding_window"}
    return fields


def _gemma3_text(c: _Config) -> dict:
    # Gemma's published files leave out what equals transformers' defaults.
    c.config = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                "vocab_size": 262208, "max_position_embeddings": 131072,
                "sliding_window": 4096} | c.config
    bias = c.take("attention_bias", False)
    every = c.take("sliding_window_pattern", c.take("_sliding_window_pattern", 6))
    windows = _windows(c, lambda i: (i + 1) % every != 0,
                       lambda: c.need("sliding_window"))
    layers = [Layer(_attention(c, own_dim=True, window=window, bias=bias,
                               output_bias=bias, qk_norm=True), _mlp(c), norms=4)
              for window in windows]
    return _common(c, layers, tied=True)


def _gpt_oss(c: _Config) -> dict:
    bias = c.take("attention_bias", True)
    windows = _windows(c, lambda i: i % 2 == 0, lambda: c.take("sliding_window", 128))
    c.only("experts_per_token", c.need("num_experts_per_tok"))     # a second name
    moe = MoE(c.need("intermediate_size"), c.need("num_local_experts"),
              c.need("num_experts_per_tok"), bias=True)
    layers = [Layer(_attention(c, own_dim=True, window=window, bias=bias,
                               output_bias=bias, sinks=True), moe)
              for window in windows]
    return _common(c, layers, tied=False)


def _opt(c: _Config) -> dict:
    c.only("do_layer_norm_before", True)
    c.only("layer_norm_elementwise_affine", True)
    c.only("_remove_final_layer_norm", False)
    c.only("word_embed_proj_dim", c.need("hidden_size"))
    bias = c.take("enable_bias", True)
    mixer = _attention(c, grouped=False, bias=bias, output_bias=bias)
    mlp = MLP(c.need("ffn_dim"), gated=False, bias=bias)
    fields = _common(c, _repeat(c, Layer(mixer, mlp)), tied=True)
    # transformers offsets positions by 2, so the table has two rows more.
    rows = c.need("max_position_embeddings") + 2
    return fields | {"norm_bias": True, "positions": rows}


def _deepseek_v2(c: _Config) -> dict:
    return _deepseek(c, router_bias=False)


def _deepseek_v3(c: _Config) -> dict:
    return _deepseek(c, router_bias=True)


def _deepseek(c: _Config, *, router_bias: bool) -> dict:
    c.only("attention_bias", False)
    c.only("moe_layer_freq", 1)
    c.read |= {"num_key_value_heads", "head_dim"}      # unused: the latent is shared
    mixer = LatentAttention(
        heads=c.need("num_attention_heads"), q_rank=c.take("q_lora_rank", None),
        kv_rank=c.need("kv_lora_rank"), nope_dim=c.need("qk_nope_head_dim"),
        rope_dim=c.need("qk_rope_head_dim"), v_dim=c.need("v_head_dim"))
    width = c.need("moe_intermediate_size")
    moe = MoE(width, c.need("n_routed_experts"), c.need("num_experts_per_tok"),
              shared_width=width * c.need("n_shared_experts"),
              router_bias=router_bias)
    dense = c.need("first_k_dense_replace")
    layers = [Layer(mixer, _mlp(c) if i < dense else moe)
              for i in range(c.need("num_hidden_layers"))]
    return _common(c, layers, tied=False)


# --------------------------------------------------------- recurrences, hybrids


def _mamba(c: _Config) -> dict:
    d_model = c.need("hidden_size")
    c.only("use_bias", False)
    c.only("use_conv_bias", True)
    c.only("rms_norm", True)
    c.read |= {"d_model", "d_inner", "n_layer", "dt_rank"}     # older second names
    rank = c.take("time_step_rank", "auto")
    mixer = Mamba(inner=_inner(c, "expand", d_model), state=c.take("state_size", 16),
                  conv=c.take("conv_kernel", 4),
                  dt_rank=-(-d_model // 16) if rank == "auto" else rank)
    if c.take("intermediate_size", mixer.inner) != mixer.inner:
        raise ValueError("config: intermediate_size is not expand x hidden_size")
    return _common(c, _repeat(c, Layer(mixer, None, norms=1)), tied=True)


def _inner(c: _Config, key: str, d_model: int) -> int:
    return int(c.take(key, 2) * d_model)


def _mamba2(c: _Config) -> dict:
    c.only("use_bias", False)
    c.only("use_conv_bias", True)
    c.only("rms_norm", True)
    c.read |= {"time_step_rank", "intermediate_size"}  # unused by Mamba-2
    mixer = Mamba2(heads=c.need("num_heads"), head_dim=c.take("head_dim", 64),
                   state=c.take("state_size", 128), groups=c.take("n_groups", 8),
                   conv=c.take("conv_kernel", 4))
    _same_width(mixer, _inner(c, "expand", c.need("hidden_size")))
    return _common(c, _repeat(c, Layer(mixer, None, norms=1)), tied=False)


def _same_width(mixer: Mamba2, inner: int) -> None:
    if mixer.inner != inner:
        raise ValueError(f"config: {mixer.heads} heads of {mixer.head_dim} are not"
                         f" the expanded width {inner}")


def _mamba_ssm(c: _Config) -> dict:
    """The config.json of the authors' own code: no model_type, an `ssm_cfg`."""
    d_model, depth = c.need("d_model"), c.need("n_layer")
    ssm = _Config(c.need("ssm_cfg"))
    c.only("d_intermediate", 0)
    c.only("attn_layer_idx", [])
    c.only("rms_norm", True)
    kind = ssm.take("layer", "Mamba1")
    inner = _inner(ssm, "expand", d_model)
    if kind == "Mamba1":
        mixer = Mamba(inner, ssm.take("d_state", 16), ssm.take("d_conv", 4),
                      -(-d_model // 16))
    elif kind == "Mamba2":
        head_dim = ssm.take("headdim", 64)
        mixer = Mamba2(inner // head_dim, head_dim, ssm.take("d_state", 128),
                       ssm.take("ngroups", 1), ssm.take("d_conv", 4))
    else:
        raise ValueError(f"config: ssm_cfg.layer {kind!r}; allowed: Mamba1, Mamba2")
    if strange := set(ssm.config) - ssm.read:
        raise ValueError(f"config: no rule for ssm_cfg {sorted(strange)}")
    multiple = c.take("pad_vocab_size_multiple", 8)
    vocab = -(-c.need("vocab_size") // multiple) * multiple
    return {"d_model": d_model, "vocab": vocab, "tied": c.take("tie_embeddings", True),
            "layers": (Layer(mixer, None, norms=1),) * depth}


def _jamba(c: _Config) -> dict:
    c.only("mamba_proj_bias", False)
    c.only("mamba_conv_bias", True)
    c.only("mamba_inner_layernorms", True)
    d_model = c.need("hidden_size")
    rank = c.take("mamba_dt_rank", "auto")
    mamba = Mamba(inner=_inner(c, "mamba_expand", d_model),
                  state=c.take("mamba_d_state", 16), conv=c.take("mamba_d_conv", 4),
                  dt_rank=-(-d_model // 16) if rank == "auto" else rank, norms=True)
    attention = _attention(c, window=c.take("sliding_window", None))
    experts, mlp = c.need("num_experts"), _mlp(c)
    active = c.need("num_experts_per_tok")
    moe = MoE(mlp.width, experts, active) if experts > 1 else mlp

    def chosen(what: str, i: int) -> bool:
        period, offset = c.need(f"{what}_layer_period"), c.need(f"{what}_layer_offset")
        return i % period == offset

    layers = [Layer(attention if chosen("attn", i) else mamba,
                    moe if chosen("expert", i) else mlp)
              for i in range(c.need("num_hidden_layers"))]
    fields = _common(c, layers, tied=False)
    return fields | {"max_tokens": c.take("max_position_embeddings", 262144)}


def _mamba2_in_hybrid(c: _Config) -> Mamba2:
    """The Mamba-2 of Bamba and of Granite."""
    c.only("mamba_proj_bias", False)
    c.only("mamba_conv_bias", True)
    heads, head_dim = c.need("mamba_n_heads"), c.take("mamba_d_head", "auto")
    inner = _inner(c, "mamba_expand", c.need("hidden_size"))
    mixer = Mamba2(heads, inner // heads if head_dim == "auto" else head_dim,
                   c.need("mamba_d_state"), c.need("mamba_n_groups"),
                   c.take("mamba_d_conv", 4))
    _same_width(mixer, inner)
    return mixer


def _bamba(c: _Config) -> dict:
    mamba = _mamba2_in_hybrid(c)
    bias = c.take("attention_bias", False)
    attention = _attention(c, bias=bias, output_bias=bias)
    mlp, chosen = _mlp(c, bias=c.take("mlp_bias", False)), c.need("attn_layer_indices")
    layers = [Layer(attention if i in chosen else mamba, mlp)
              for i in range(c.need("num_hidden_layers"))]
    fields = _common(c, layers, tied=False)
    return fields | {"max_tokens": c.take("max_position_embeddings", 262144)}


def _granite_hybrid(c: _Config) -> dict:
    kinds = _kinds(c, c.need("layer_types"), {"mamba", "attention"})
    mamba = _mamba2_in_hybrid(c) if "mamba" in kinds else None
    bias = c.take("attention_bias", False)
    attention = _attention(c, grouped=False, bias=bias, output_bias=bias)
    width, experts = c.need("intermediate_size"), c.need("num_local_experts")
    shared, active = c.need("shared_intermediate_size"), c.need("num_experts_per_tok")
    # Without experts the shared MLP is all there is (Granite 4.0 H Micro).
    mlp = MoE(width, experts, active, shared_width=shared) if experts else MLP(shared)
    layers = [Layer(mamba if kind == "mamba" else attention, mlp) for kind in kinds]
    return _common(c, layers, tied=False)


def _nemotron_h(c: _Config) -> dict:
    for key in ("use_bias", "attention_bias", "mlp_bias", "mamba_proj_bias"):
        c.only(key, False)
    c.only("use_conv_bias", True)
    c.only("mlp_hidden_act", "relu2")
    c.read |= {"expand", "head_dim"}           # heads x mamba_head_dim decides
    mamba = Mamba2(c.need("mamba_num_heads"), c.need("mamba_head_dim"),
                   c.need("ssm_state_size"), c.need("n_groups"),
                   c.take("conv_kernel", 4))
    head_dim = c.take("attention_head_dim", c.take("head_dim", None))
    if head_dim is None:
        raise ValueError("config: required key 'attention_head_dim' is missing")
    attention = Attention(c.need("num_attention_heads"),
                          c.need("num_key_value_heads"), head_dim)
    mlp = MLP(c.need("intermediate_size"), gated=False)
    kinds = {"M": Layer(mamba, None, norms=1), "*": Layer(attention, None, norms=1),
             "-": Layer(None, mlp, norms=1)}
    pattern = c.need("hybrid_override_pattern")
    if strange := set(pattern) - set(kinds):
        raise ValueError(f"config: hybrid_override_pattern has {sorted(strange)};"
                         f" allowed: {sorted(kinds)}")
    return _common(c, [kinds[kind] for kind in pattern], tied=False)


def _qwen3_next(c: _Config) -> dict:
    depth = c.need("num_hidden_layers")
    every = c.take("full_attention_interval", 4)
    rule = ["linear_attention" if (i + 1) % every else "full_attention"
            for i in range(depth)]
    kinds = _kinds(c, rule, {"linear_attention", "full_attention"})
    delta = GatedDeltaNet(
        key_heads=c.need("linear_num_key_heads"),
        value_heads=c.need("linear_num_value_heads"),
        key_dim=c.need("linear_key_head_dim"),
        value_dim=c.need("linear_value_head_dim"),
        conv=c.take("linear_conv_kernel_dim", 4))
    bias = c.take("attention_bias", False)
    attention = _attention(c, own_dim=True, bias=bias, output_bias=bias,
                           qk_norm=True, output_gate=True)
    moe = MoE(c.need("moe_intermediate_size"), c.need("num_experts"),
              c.need("num_experts_per_tok"), shared_gate=True,
              shared_width=c.need("shared_expert_intermediate_size"))
    dense, step, mlp = (c.take("mlp_only_layers", []),
                        c.take("decoder_sparse_step", 1), _mlp(c))
    layers = [Layer(delta if kind == "linear_attention" else attention,
                    mlp if i in dense or (i + 1) % step else moe)
              for i, kind in enumerate(kinds)]
    return _common(c, layers, tied=False)


FAMILIES: dict[str, Callable[[_Config], dict]] = {
    "llama": _llama, "mistral": _mistral, "mixtral": _mixtral, "qwen2": _qwen2,
    "qwen3": _qwen3, "gemma3": _gemma3, "gemma3_text": _gemma3_text,
    "gpt_oss": _gpt_oss, "opt": _opt, "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3, "mamba": _mamba, "mamba2": _mamba2,
    "jamba": _jamba, "bamba": _bamba, "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h, "qwen3_next": _qwen3_next,
}
