"""Reading other GGUF files, against a plain forward pass."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter
from gguf.quants import dequantize, quantize
from opsbyte import llm, models

# A head narrower than heads × head_dim suggests, so that a wrong guess shows.
D, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS = 64, 4, 2, 32, 96, 3
EPS, BASE, CONTEXT = 1e-3, 500.0, 48
TOKENS = ["<s>", "</s>", "th", *map(chr, range(ord("!"), ord("~") + 1))]
F32, F16, Q8_0 = (GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0"))


def make_weights(tied: bool) -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    """Random weights as float32 that their storage type holds exactly."""
    rng = np.random.default_rng(7)
    shapes = {"token_embd": ((len(TOKENS), D), Q8_0), "output_norm": ((D,), F32)}
    if not tied:
        shapes["output"] = ((len(TOKENS), D), F16)
    for i in range(LAYERS):
        for name, shape, kind in [
            ("attn_norm", (D,), F32), ("ffn_norm", (D,), F32),
            ("attn_q", (HEADS * HEAD_DIM, D), Q8_0),
            ("attn_k", (KV_HEADS * HEAD_DIM, D), F16),
            ("attn_v", (KV_HEADS * HEAD_DIM, D), F32),
            ("attn_output", (D, HEADS * HEAD_DIM), Q8_0),
            ("ffn_gate", (WIDTH, D), F16), ("ffn_up", (WIDTH, D), Q8_0),
            ("ffn_down", (D, WIDTH), Q8_0),
        ]:
            shapes[f"blk.{i}.{name}"] = (shape, kind)
    weights = {}
    for name, (shape, kind) in shapes.items():
        values = rng.normal(size=shape).astype(np.float32) * 0.3 + (len(shape) == 1)
        weights[name] = (dequantize(quantize(values, kind), kind), kind)
    return weights


def neighbours(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows from the halves layout of rotary pairs to the neighbours of GGUF."""
    halves = matrix.reshape(heads, 2, HEAD_DIM // 2, D)
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def write(path, weights, *, factors=None, skip=(), **metadata):
    """A GGUF file; `metadata` overrides keys, written with _ for a dot."""
    order = metadata.get("order", GGUFEndian.LITTLE)
    writer = GGUFWriter(path, metadata.pop("architecture", "llama"), endianess=order)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(BASE)
    if metadata.get("scaling"):
        writer.add_string("llama.rope.scaling.type", metadata["scaling"])
    if metadata.get("rotary_dim"):
        writer.add_rope_dimension_count(metadata["rotary_dim"])
    writer.add_tokenizer_model(metadata.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(metadata.get("pre", "gpt-2"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, (values, kind) in weights.items():
        if name in skip:
            continue
        if name.endswith("attn_q"):
            values = neighbours(values, HEADS)
        if name.endswith("attn_k"):
            values = neighbours(values, KV_HEADS)
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def forward(weights, ids, factors) -> np.ndarray:
    """Logits (T, vocab) by a loop in float64, rotary pairs as two halves."""
    w = {name: values.astype(np.float64) for name, (values, _) in weights.items()}

    def norm(x, weight):
        return x / np.sqrt((x**2).mean() + EPS) * weight

    def turn(head, position):
        a, b = np.split(head, 2)
        angle = position * BASE ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        angle = angle / factors
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin])

    xs = [w["token_embd"][token] for token in ids]
    for i in range(LAYERS):
        layer = {n[6:]: values for n, values in w.items() if n.startswith(f"blk.{i}.")}
        keys, values = [], []
        for t, x in enumerate(xs):
            h = norm(x, layer["attn_norm"])
            q = (layer["attn_q"] @ h).reshape(HEADS, HEAD_DIM)
            k = (layer["attn_k"] @ h).reshape(KV_HEADS, HEAD_DIM)
            keys.append([turn(head, t) for head in k])
            values.append((layer["attn_v"] @ h).reshape(KV_HEADS, HEAD_DIM))
            out = []
            for head in range(HEADS):
                shared = head // (HEADS // KV_HEADS)
                query = turn(q[head], t)
                scores = np.array([query @ past[shared] for past in keys])
                p = np.exp(scores / np.sqrt(HEAD_DIM))
                out.append(sum(a * v[shared] for a, v in zip(p / p.sum(), values,
                                                             strict=True)))
            x = x + layer["attn_output"] @ np.concatenate(out)
            h = norm(x, layer["ffn_norm"])
            gate = layer["ffn_gate"] @ h
            xs[t] = x + layer["ffn_down"] @ (
                gate / (1 + np.exp(-gate)) * (layer["ffn_up"] @ h)
            )
    head = w.get("output", w["token_embd"])
    return np.array([head @ norm(x, w["output_norm"]) for x in xs])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_logits_against_a_float64_loop(tmp_path, tied, scaled, fused):
    weights = make_weights(tied)
    factors = np.linspace(1, 8, HEAD_DIM // 2).astype(np.float32)
    path = write(tmp_path / "tiny.gguf", weights, factors=factors if scaled else None)
    model = llm.load(path=path, fused=fused)
    assert model.config == models.ModelConfig(
        name="tiny", d_model=D, vocab=len(TOKENS), tied=tied, max_tokens=CONTEXT,
        layers=LAYERS * (models.Layer(models.Attention(HEADS, KV_HEADS, HEAD_DIM),
                                      models.MLP(WIDTH)),),
    )
    ids = np.random.default_rng(1).integers(0, len(TOKENS), 23)
    expected = forward(weights, ids, factors if scaled else 1.0)
    logits = model(torch.from_numpy(ids)[None])[0]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


# bf16 rounds to 8 significant bits and fp16 to 11; errors of about ten roundings.
@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.06), ("fp16", 0.0075)])
@pytest.mark.parametrize("fused", [False, True])
def test_half_precision(tmp_path, dtype, tolerance, fused):
    weights = make_weights(tied=False)
    path = write(tmp_path / "tiny.gguf", weights)
    model = llm.load(dtype, path, fused=fused)
    ids = np.random.default_rng(2).integers(0, len(TOKENS), 15)
    expected = torch.from_numpy(forward(weights, ids, 1.0))
    cache = model.new_cache(15)
    parts = [model(p[None], cache)[0] for p in torch.from_numpy(ids).split([8, 1, 6])]
    assert cache.keys.dtype == llm.DTYPES[dtype]
    error = torch.linalg.vector_norm(torch.cat(parts) - expected)
    assert error < tolerance * torch.linalg.vector_norm(expected)


def test_config_is_the_catalogues(smollm):
    mine, theirs = smollm.config, models.model("smollm2-135m")
    shape = ("d_model", "vocab", "layers", "tied", "max_tokens")
    for field in shape:
        assert getattr(mine, field) == getattr(theirs, field), field


@pytest.mark.parametrize(("options", "message"), [
    ({"architecture": "gemma"}, "architecture 'gemma'"),
    ({"skip": ["blk.1.ffn_up"]}, r"lacks the tensors \['blk.1.ffn_up.weight'\]"),
    ({"tokenizer": "bert"}, "tokenizer 'bert'"),
    ({"pre": "glm4"}, "pre-tokenizer 'glm4'"),
    ({"scaling": "yarn"}, "rope scaling 'yarn'"),
    ({"rotary_dim": 16}, "part of a head"),
    ({"order": GGUFEndian.BIG}, "byte order"),
])
def test_refuses_what_it_does_not_understand(tmp_path, options, message):
    path = write(tmp_path / "tiny.gguf", make_weights(tied=True), **options)
    with pytest.raises(ValueError, match=message):
        llm.read(path)


def test_refuses_unknown_and_misshapen_tensors(tmp_path):
    bias = {"blk.0.attn_q_norm": (np.ones(HEAD_DIM, np.float32), F32)}
    path = write(tmp_path / "a.gguf", make_weights(tied=True) | bias)
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q_norm\.weight"):
        llm.read(path)
    wrong = {"output_norm": (np.ones(D + 1, np.float32), F32)}
    path = write(tmp_path / "b.gguf", make_weights(tied=True) | wrong)
    with pytest.raises(ValueError, match=r"output_norm\.weight has shape \(65,\)"):
        llm.read(path)


def test_refuses_damaged_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        llm.read(tmp_path / "absent.gguf")
    data = write(tmp_path / "tiny.gguf", make_weights(tied=True)).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for content in (b"", b"GGUF", b"PK\3\4" + data[4:], data[:900], data[:-2000]):
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged\.gguf"):
            llm.read(damaged)


def test_unknown_dtype():
    with pytest.raises(ValueError, match="dtype='int3': allowed are fp32, bf16, fp16"):
        llm.load("int3")
