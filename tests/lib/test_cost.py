"""The cost model against published figures, identities and brute force."""
from __future__ import annotations

import itertools

import pytest
from opsbyte import cost, diffusion, models
from opsbyte.models import MLP, Attention, Layer, ModelConfig

LINEAR = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
EVERY = [m.name for m in models.models()]


def products(c: cost.Cost, head_dim: int) -> float:
    """FLOPs of matrix products alone, as the published figures count them."""
    core = c["attn.core"].flops * 4 * head_dim / (4 * head_dim + cost.SOFTMAX)
    return c.part(*LINEAR).flops + core


# ---- published figures ---------------------------------------------------

def test_llama_2_7b_prefill_and_decode():
    m = models.model("llama-2-7b")
    full = cost.prefill(m, 2048, causal=False)
    half = cost.prefill(m, 2048)
    step = cost.decode(m, 2047)                  # sees 2,048 keys
    assert products(full, 128) == pytest.approx(2.8725e13, rel=2e-5)
    assert products(half, 128) == pytest.approx(2.7626e13, rel=2e-5)
    assert products(step, 128) == pytest.approx(1.4026e10, rel=3e-5)
    with_head = products(step, 128) + step["head"].flops
    assert with_head == pytest.approx(1.4288e10, rel=3e-5)
    # Everything counted, element-wise work adds less than a tenth of a percent.
    assert 1 < (full.flops - full["head"].flops) / 2.8725e13 < 1.001


def test_unfused_attention_is_62_ops_per_byte():
    """(4 N² d + 3 N²) / (8 N² + 8 N d), N = 4096, d = 128, one head, 16 bit."""
    m = ModelConfig("one head", 128, 1, (Layer(Attention(1, 1, 128), None, 1),))
    core = cost.prefill(m, 4096, causal=False, fused=False)["attn.core"]
    N, d = 4096, 128
    assert core.flops == 4 * N * N * d + 3 * N * N
    assert core.bytes == 8 * N * N + 8 * N * d
    assert core.intensity == pytest.approx(62.4, abs=0.05)
    # It is not decode: there every key and value is met by one query.
    decode = cost.decode(m, N, fused=False)["attn.core"]
    assert decode.intensity == pytest.approx(1, abs=0.05)


def test_unfused_attention_moves_four_score_matrices_more():
    """Shapes of the FlashAttention paper's figure 2 (N = 1024, d = 64, 16 heads,
    batch 64): written, read, written, read; 2.1 GB each, times four of the 40.3
    GB that the figure gives for forward and backward together."""
    m = ModelConfig("gpt2-medium", 1024, 1, (Layer(Attention(16, 16, 64), None, 1),))
    scores = 64 * 16 * 1024 * 1024 * 2
    naive = cost.prefill(m, 1024, 64, fused=False, causal=False)["attn.core"]
    flash = cost.prefill(m, 1024, 64, causal=False)["attn.core"]
    assert naive.bytes - flash.bytes == 4 * scores
    assert flash.bytes == 4 * 64 * 16 * 1024 * 64 * 2     # q, k, v, o


def test_attention_overtakes_the_linear_layers_where_the_notes_are_wrong():
    """S9: Llama-2-7B, about 25k tokens in FLOPs; 800 at batch 32 in bytes."""
    m = models.model("llama-2-7b")

    def attention_share(S):
        c = cost.decode(m, S)
        return c["attn.core"].flops / c.part(*LINEAR).flops

    assert attention_share(24_000) < 1 < attention_share(26_000)
    per_batch = cost.decode(m, 760, 32), cost.decode(m, 820, 32)
    assert per_batch[0].cache_bytes < per_batch[0].weight_bytes
    assert per_batch[1].cache_bytes > per_batch[1].weight_bytes


def test_llama_3_70b_int8_batch_32_fills_112_gb():
    held = cost.memory(models.model("llama-3-70b"), 8192, 32, dtype="int8")
    assert held == pytest.approx(112e9, rel=0.02)


# ---- identities ------------------------------------------------------------

@pytest.mark.parametrize("T, S, window, causal", list(itertools.product(
    (1, 2, 5, 8), (0, 1, 3, 9), (None, 1, 2, 4, 50), (True, False))))
def test_pairs_and_keys_against_a_loop(T, S, window, causal):
    pairs, keys = 0, set()
    for i in range(T):
        query = S + i
        for key in range(S + T):
            near = window is None or key > query - window
            if key <= query and near:
                keys.add(key)
                pairs += 1
    if causal:
        assert cost.visible_pairs(T, S, window=window) == pairs
        assert cost.keys_read(T, S, window=window) == len(keys)
    else:
        seen = min(window or S + T, S + T)
        assert cost.visible_pairs(T, S, window=window, causal=False) == T * seen


@pytest.mark.parametrize("name", EVERY)
def test_weights_read_are_the_parameters(name):
    """A step of one token reads each active weight once: of the embedding, a
    row; of a tied matrix, all of it as the head."""
    m = models.model(name)
    c = cost.decode(m, 100)
    read = (c.weight_bytes - c["embed"].weight_bytes) / 2
    tables = (0 if m.tied else m.vocab * m.d_model) + m.positions * m.d_model
    assert read + tables == pytest.approx(m.active_parameters(), rel=1e-12)
    # Rows of experts that are touched by many tokens: all of them.
    many = cost.prefill(m, 4096)
    read = (many.weight_bytes - many["embed"].weight_bytes) / 2
    assert read + tables == pytest.approx(m.parameters(), rel=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_cache_read_is_the_cache_held(name):
    """Decode reads the cache (and the new token), and writes the new token;
    a recurrent state is read and written."""
    m = models.model(name)
    S = 20_000
    c = cost.decode(m, S)
    held = m.cache_bytes(S)
    assert held * (1 - 1e-3) <= c.cache_bytes <= held * 2 + 1
    if not any(op.name.startswith(("ssm", "delta")) for op in c.operators):
        assert c.cache_bytes == pytest.approx(held, rel=2e-3)


@pytest.mark.parametrize("name", EVERY)
def test_chunks_sum_to_one_shot(name):
    m = models.model(name)
    whole = cost.prefill(m, 300, absorb=True, logits="none")
    chunks = [cost.prefill(m, t, context=s, absorb=True, logits="none")
              for s, t in ((0, 100), (100, 1), (101, 150), (251, 49))]
    total = chunks[0] + chunks[1] + chunks[2] + chunks[3]
    assert total.flops == pytest.approx(whole.flops, rel=1e-12)
    for name in {o.name for o in whole.operators}:
        assert total[name].flops == pytest.approx(whole[name].flops, rel=1e-12)
    assert total.bytes > whole.bytes            # the weights were read four times


@pytest.mark.parametrize("name", EVERY)
def test_decode_is_prefill_of_one(name):
    m = models.model(name)
    assert cost.decode(m, 777, 3) == cost.prefill(m, 1, 3, context=777)
    assert (cost.decode(m, 777, 3, width=4)
            == cost.prefill(m, 4, 3, context=777, logits="all"))


@pytest.mark.parametrize("name", EVERY)
def test_batch_is_linear_in_all_but_weights(name):
    m = models.model(name)
    one, many = cost.prefill(m, 64), cost.prefill(m, 64, 5)
    assert many.flops == pytest.approx(5 * one.flops, rel=1e-12)
    assert many.cache_bytes == pytest.approx(5 * one.cache_bytes, rel=1e-12)
    assert many.activation_bytes == pytest.approx(5 * one.activation_bytes, rel=1e-12)
    assert many.launches == one.launches
    dense = not any(o.name.startswith("moe") for o in one.operators)
    if dense:
        rows = many["embed"].weight_bytes - one["embed"].weight_bytes
        assert many.weight_bytes - rows == pytest.approx(one.weight_bytes, rel=1e-12)


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-27b", "gpt-oss-120b"])
def test_fusing_attention_changes_bytes_and_not_flops(name):
    m = models.model(name)
    fused, plain = cost.prefill(m, 2048), cost.prefill(m, 2048, fused=False)
    assert fused.flops == pytest.approx(plain.flops, rel=1e-12)
    assert fused.weight_bytes == plain.weight_bytes
    assert fused.cache_bytes == plain.cache_bytes
    assert fused.activation_bytes < plain.activation_bytes


def test_flops_are_two_per_active_weight_and_token():
    """2 n N for the products; what is left is attention and small things."""
    for name in ("llama-3-8b", "mixtral-8x7b", "deepseek-v3", "mamba-2.8b"):
        m = models.model(name)
        c = cost.decode(m, 1)
        weights = m.active_parameters(embedding=False)
        assert c.flops == pytest.approx(2 * weights, rel=0.04)


def test_dtypes_scale_their_own_bytes():
    m = models.model("llama-3-8b")
    base = cost.decode(m, 5000, 2)
    quantized = cost.decode(m, 5000, 2, weight_dtype="int8", cache_dtype="fp8",
                            activation_dtype="fp32")
    assert quantized.flops == base.flops
    assert quantized.weight_bytes == base.weight_bytes / 2
    assert quantized.cache_bytes == base.cache_bytes / 2
    assert quantized.activation_bytes == base.activation_bytes * 2
    assert cost.decode(m, 5000, 2, dtype="fp32").bytes == 2 * base.bytes


def test_window_caps_what_decode_reads():
    m = models.model("mistral-7b")
    window = m.layers[0].mixer.window
    far, near = cost.decode(m, 50_000), cost.decode(m, window)
    assert far.cache_bytes == near.cache_bytes
    assert far.flops == near.flops


# ---- kinds of layer ----------------------------------------------------------

def test_absorbed_and_plain_latent_attention():
    """One expands every cached latent, the other works on the latents: same
    weights, and each is the cheaper one where it is used."""
    m = models.model("deepseek-v3")
    plain, absorbed = (cost.decode(m, 8192, absorb=x) for x in (False, True))
    assert plain.weight_bytes == absorbed.weight_bytes
    assert absorbed.flops < plain.flops / 10
    assert cost.decode(m, 8192) == absorbed
    prompt = cost.prefill(m, 8192)
    assert prompt == cost.prefill(m, 8192, absorb=False)
    # 128 heads share one key: far more work per byte than MHA's 1.
    assert absorbed["attn.core"].intensity > 200
    # Attention by hand: 128 heads, 576 + 512, 8193 keys, 61 layers.
    by_hand = 61 * 128 * 8193 * (2 * 576 + 2 * 512 + cost.SOFTMAX)
    assert absorbed["attn.core"].flops == by_hand


def test_experts_touched():
    assert cost.experts_touched(8, 2, 1) == pytest.approx(2)
    assert cost.experts_touched(256, 8, 10**6) == pytest.approx(256)
    # Against the enumeration of all routings of 3 tokens to 2 of 4 experts.
    routes = list(itertools.combinations(range(4), 2))
    mean = sum(len({e for r in picks for e in r})
               for picks in itertools.product(routes, repeat=3)) / len(routes) ** 3
    assert cost.experts_touched(4, 2, 3) == pytest.approx(mean)


def test_mixture_reads_more_weights_with_batch_and_not_more_flops_per_token():
    m = models.model("mixtral-8x7b")
    one, many = cost.decode(m, 100), cost.decode(m, 100, 64)
    assert many["moe.up"].weight_bytes == pytest.approx(
        4 * one["moe.up"].weight_bytes, rel=1e-6)
    assert many["moe.up"].flops == 64 * one["moe.up"].flops


def test_recurrent_state_is_moved_once_a_pass_or_once_a_token():
    m = models.model("mamba-2.8b")
    fused, plain = cost.prefill(m, 100), cost.prefill(m, 100, fused=False)
    assert fused.cache_bytes == 2 * m.cache_bytes(0)
    assert plain.cache_bytes == 100 * fused.cache_bytes
    assert cost.decode(m, 10).cache_bytes == cost.decode(m, 10**6).cache_bytes
    assert fused.flops == plain.flops


def test_local_and_global_layers_are_told_apart():
    c = cost.decode(models.model("gemma-3-1b"), 32_768)
    assert c["attn.core.window"].count == 22
    assert c["attn.core"].count == 26            # the name totals what is below it
    with pytest.raises(ValueError, match="nothing.*attn.qkv"):
        c["nothing"]


# ---- arithmetic of costs ------------------------------------------------------

def test_costs_add_one_pass_after_the_other():
    m = models.model("llama-3-8b")
    a, b = cost.prefill(m, 100), cost.decode(m, 100)
    total = a + b
    for name in ("flops", "bytes", "weight_bytes", "cache_bytes",
                 "activation_bytes", "launches"):
        assert getattr(total, name) == getattr(a, name) + getattr(b, name)
    assert total["head"].count == 2
    assert total.intensity == total.flops / total.bytes
    with pytest.raises(ValueError, match="int8"):
        a + cost.decode(m, 100, weight_dtype="int8")


@pytest.mark.parametrize("options, message", [
    ({"tokens": 0}, "tokens.*0"), ({"tokens": 1.5}, "tokens.*1.5"),
    ({"batch": 0}, "batch.*0"), ({"context": -1}, "context.*-1"),
    ({"dtype": "bf61"}, "bf61"), ({"weight_dtype": "int9"}, "int9"),
    ({"logits": "some"}, "logits.*some")])
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        cost.prefill(models.model("llama-3-8b"), **{"tokens": 8, **options})


def test_bad_width_is_named():
    with pytest.raises(ValueError, match="width.*0"):
        cost.decode(models.model("llama-3-8b"), 8, width=0)


def test_mlp_without_gate():
    m = ModelConfig("plain", 64, 100, (Layer(None, MLP(256, gated=False), 1),))
    c = cost.prefill(m, 10, logits="none")
    assert c.part("mlp.up", "mlp.down").flops == 2 * 10 * 64 * 256 * 2
    assert c["mlp.norm"].count == 1


# ---- diffusion ----------------------------------------------------------------

@pytest.mark.parametrize("name, published", [
    ("dit-xl-2", 675.13e6), ("sd3-medium", 2.085e9), ("flux.1-dev", 11.90e9),
    ("wan2.1-14b", 14.29e9)])
def test_diffusion_parameters(name, published):
    m = diffusion.model(name)
    assert m.parameters() == pytest.approx(published, rel=1e-3)
    c = cost.diffusion_step(m, 64)
    tables = (m.classes + m.positions) * m.d_model     # looked up, not read
    assert c.weight_bytes / 2 + tables == m.parameters()


def test_dit_gflops_are_multiply_adds():
    """The DiT paper's 118.64 "Gflops" count a multiply-add once."""
    m = diffusion.model("dit-xl-2")
    c = cost.diffusion_step(m, m.tokens(256, 256))
    small = sum(o.flops for o in c.operators
                if o.name.split(".")[-1] in ("norm", "act", "rope"))
    softmax = 28 * 16 * 256 * 256 * cost.SOFTMAX
    assert (c.flops - small - softmax) / 2 == pytest.approx(118.64e9, rel=1e-3)


def test_flux_gflops_leave_attention_out():
    """The diffusers benchmarks' 59,523 "Gflops" of FLUX.1-dev."""
    m = diffusion.model("flux.1-dev")
    c = cost.diffusion_step(m, 4096)
    small = ("norm", "act", "rope", "core")
    products = sum(o.flops for o in c.operators
                   if o.name.split(".")[-1] not in small)
    assert products == pytest.approx(59_523.04e9, rel=1e-3)


def test_diffusion_tokens():
    assert diffusion.model("dit-xl-2").tokens(256, 256) == 256
    assert diffusion.model("flux.1-dev").tokens(1024, 1024) == 4096
    assert diffusion.model("wan2.1-14b").tokens(720, 1280, 81) == 75_600
    assert diffusion.model("wan2.1-14b").tokens(480, 832, 81) == 32_760
    for size in ((1000, 1024, 1), (1024, 8, 1), (480, 832, 80)):
        with pytest.raises(ValueError, match=r"height|width|frames"):
            diffusion.model("wan2.1-14b").tokens(*size)


@pytest.mark.parametrize("name", [m.name for m in diffusion.models()])
def test_diffusion_batch_and_fusing(name):
    m = diffusion.model(name)
    one, two = cost.diffusion_step(m, 256), cost.diffusion_step(m, 256, 2)
    assert two.flops == pytest.approx(2 * one.flops)
    assert two.weight_bytes == one.weight_bytes
    plain = cost.diffusion_step(m, 256, fused=False)
    assert plain.flops == pytest.approx(one.flops)
    assert plain.bytes > one.bytes
    # No cache is read, so nothing is called one.
    assert one.cache_bytes == 0


def test_unknown_diffusion_model():
    with pytest.raises(ValueError, match="flux.1-dev"):
        diffusion.model("flux-dev")
