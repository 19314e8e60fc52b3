"""The transformer and its cache: every way of computing the same thing agrees."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from opsbyte import llm

# Float32 logits are up to about 30; sums in another order move them this much.
CLOSE = {"rtol": 0, "atol": 2e-3}
TEXT = (
    "Memory bandwidth, not arithmetic, decides how fast a language model writes. "
    "Each new token needs every weight once, and a weight is two bytes to fetch "
    "for two operations to do."
)


@pytest.fixture(scope="module")
def ids(smollm):
    return torch.tensor([smollm.tokenizer.encode(TEXT)])


@pytest.fixture(scope="module")
def logits(smollm, ids):
    return smollm(ids)


def run(model, ids, sizes, cache=None, **options):
    """Logits of all tokens, fed through a cache in pieces of the given sizes."""
    if cache is None:
        cache = model.new_cache(ids.shape[1], batch=ids.shape[0])
    return torch.cat([model(p, cache, **options) for p in ids.split(sizes, 1)], 1)


def test_shape_and_type(smollm, ids, logits):
    assert logits.shape == (1, ids.shape[1], 49152)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(smollm(ids.int()), logits, rtol=0, atol=0)


def test_one_by_one_equals_at_once(smollm, ids, logits):
    torch.testing.assert_close(run(smollm, ids, 1), logits, **CLOSE)


def test_chunked_prefill_equals_at_once(smollm, ids, logits):
    total = ids.shape[1]
    for sizes in ([7, 1, total - 8], [total - 2, 2], [2, total - 5, 3]):
        torch.testing.assert_close(run(smollm, ids, sizes), logits, **CLOSE)


def test_batch_of_two_equals_two(smollm, ids, logits):
    other = ids.flip(1)
    both = torch.cat([ids, other])
    expected = torch.cat([logits, smollm(other)])
    torch.testing.assert_close(smollm(both), expected, **CLOSE)
    total = ids.shape[1]
    torch.testing.assert_close(run(smollm, both, [5, total - 6, 1]), expected, **CLOSE)


def test_causal(smollm, ids, logits):
    changed = ids.clone()
    changed[0, 20:] = 100
    torch.testing.assert_close(smollm(changed)[:, :20], logits[:, :20], **CLOSE)
    assert (smollm(changed)[:, 20:] - logits[:, 20:]).abs().max() > 1


def test_last_only(smollm, ids, logits):
    last = smollm(ids, last_only=True)
    torch.testing.assert_close(last, logits[:, -1:], **CLOSE)


def test_plain_separate_products_equal_packed_fused_ones(ids, logits):
    names = []

    def plain(name, weight):
        names.append(name)
        return lambda x: F.linear(x, weight)

    model = llm.load(linear=plain, fused=False)
    total = ids.shape[1]
    torch.testing.assert_close(run(model, ids, [9, total - 9]), logits, **CLOSE)
    assert names[:7] == [f"blk.0.{name}" for name in (
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
    )]
    assert names[-1] == "output" and len(names) == 7 * 30 + 1


def test_bf16_is_close(ids, logits):
    model = llm.load("bf16")
    for half in (model(ids), run(model, ids, [30, 1, ids.shape[1] - 31])):
        same = half.argmax(-1) == logits.argmax(-1)
        assert same.float().mean() > 0.85
        p, q = logits.log_softmax(-1), half.log_softmax(-1)
        assert (p.exp() * (p - q)).sum(-1).mean() < 0.05  # KL divergence, nats
    assert model.new_cache(8).keys.dtype == model.embedding.dtype == torch.bfloat16


def test_packing_is_optional(monkeypatch):
    weight, x = torch.randn(6, 4), torch.randn(2, 3, 4)
    expected = F.linear(x, weight)
    torch.testing.assert_close(llm.linear("w", weight)(x), expected)

    def unavailable(*_):
        raise RuntimeError("no oneDNN here")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", unavailable)
    torch.testing.assert_close(llm.linear("w", weight)(x), expected, rtol=0, atol=0)


def test_bf16_one_row_and_many_are_the_same_product():
    torch.manual_seed(0)
    weight, x = torch.randn(48, 96).bfloat16(), torch.randn(2, 3, 96).bfloat16()
    product = llm.linear("w", weight)
    for rows in (x, x[:1, :1], x[1, 2]):
        reference = rows.double() @ weight.double().T
        assert product(rows).shape == reference.shape
        # one rounding to bf16 at the end, 8 bits
        torch.testing.assert_close(
            product(rows).double(), reference, rtol=2**-8, atol=1e-3
        )
    assert torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError):
        product(x[0, 0, :5])
    assert torch.backends.mkldnn.enabled  # whatever happens, it is on again


def test_attention_is_an_argument(smollm, ids, logits):
    seen = []

    def plain(q, k, v, *, causal):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), causal))
        k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / 8
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(
            scores.shape[-1] - scores.shape[-2]
        )
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v

    total = ids.shape[1]
    torch.testing.assert_close(
        run(smollm, ids, [10, total - 10], attention=plain), logits, **CLOSE
    )
    assert seen[0] == ((1, 9, 10, 64), (1, 3, 10, 64), (1, 3, 10, 64), True)
    assert seen[30] == ((1, 9, total - 10, 64), *[(1, 3, total, 64)] * 2, True)
    assert len(seen) == 60
    torch.testing.assert_close(smollm(ids, attention=plain), logits, **CLOSE)


@pytest.mark.parametrize(("new", "seen"), [(1, 1), (1, 9), (5, 5), (4, 9), (7, 8)])
@pytest.mark.parametrize("causal", [True, False])
def test_sdpa_against_a_float64_loop(new, seen, causal):
    torch.manual_seed(new + seen)
    q = torch.randn(2, 6, new, 8)
    k, v = torch.randn(2, 2, 2, seen, 8)
    expected = torch.empty(q.shape, dtype=torch.float64)
    for b, h, t in ((b, h, t) for b in range(2) for h in range(6) for t in range(new)):
        visible = seen - new + t + 1 if causal else seen
        keys, values = (x[b, h // 3, :visible].double() for x in (k, v))
        weights = (keys @ q[b, h, t].double() * 0.3).softmax(0)
        expected[b, h, t] = weights @ values
    out = llm.sdpa(q, k, v, causal=causal, scale=0.3)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("new", "seen"), [(2, 2), (128, 128), (131, 300), (300, 300)])
def test_sdpa_in_bf16_against_float64(new, seen):
    torch.manual_seed(new)
    q = torch.randn(2, 6, new, 8).bfloat16()
    k, v = torch.randn(2, 2, 2, seen, 8).bfloat16()
    keys, values = (x.double().repeat_interleave(3, 1) for x in (k, v))
    scores = q.double() @ keys.transpose(2, 3) * 0.3
    mask = torch.arange(seen) > torch.arange(seen - new, seen)[:, None]
    expected = scores.masked_fill(mask, -torch.inf).softmax(-1) @ values
    # Scores up to 10 in bf16 are off by up to 2^-6: weights by that share.
    out = llm.sdpa(q, k, v, scale=0.3).double()
    torch.testing.assert_close(out, expected, rtol=0, atol=4e-2)
    assert (out - expected).abs().mean() < 4e-3


def test_a_cache_is_any_object_with_three_members(smollm, ids, logits):
    class Growing:
        """Keeps a list of keys and values per layer."""

        def __init__(self):
            self.length, self.kept = 0, {}

        def attend(self, layer, q, k, v, attention):
            old = self.kept.get(layer, (k[:, :, :0], v[:, :, :0]))
            kept = torch.cat([old[0], k], 2), torch.cat([old[1], v], 2)
            self.kept[layer] = kept
            return attention(q, *kept, causal=True)

        def advance(self, tokens):
            self.length += tokens

        def __len__(self):  # an empty cache is falsy, and yet a cache
            return self.length

    out = run(smollm, ids, [11, 1, ids.shape[1] - 12], Growing())
    torch.testing.assert_close(out, logits, **CLOSE)
    torch.testing.assert_close(
        llm.nll(smollm, TEXT, cache=Growing(), chunk=16), llm.nll(smollm, TEXT), **CLOSE
    )


def test_cache_is_allocated_once_and_forgets(smollm, ids, logits):
    cache = smollm.new_cache(64)
    where = cache.keys.data_ptr(), cache.values.data_ptr()
    assert cache.nbytes == 0
    smollm(ids[:, :20], cache)
    assert cache.length == 20
    assert cache.nbytes == 20 * smollm.config.cache_bytes(1, dtype="fp32")
    smollm(ids[:, :7] + 5, cache)
    cache.length = 20  # drops the seven
    torch.testing.assert_close(smollm(ids[:, 20:], cache), logits[:, 20:], **CLOSE)
    assert where == (cache.keys.data_ptr(), cache.values.data_ptr())


def test_positions(smollm, ids, logits):
    total = ids.shape[1]
    # Attention sees only differences of positions.
    shifted = smollm(ids, positions=torch.arange(total) + 1000)
    torch.testing.assert_close(shifted, logits, rtol=0, atol=2e-2)
    per_row = torch.stack([torch.arange(total), torch.arange(total) * 2])
    out = smollm(ids.expand(2, -1), positions=per_row)
    torch.testing.assert_close(out[:1], logits, **CLOSE)
    assert (out[1] - logits[0]).abs().max() > 1


def test_early_exit(smollm, ids):
    cache = smollm.new_cache(64)
    out = smollm(ids, cache, layers=4)
    assert out.shape == (1, ids.shape[1], 49152)
    assert cache.keys[3].any() and not cache.keys[4].any()


@pytest.mark.parametrize(("bad", "message"), [
    (torch.tensor([1, 2]), r"ids: shape \(2,\)"),
    (torch.tensor([[1.0, 2.0]]), r"of torch.float32"),
    (torch.zeros(1, 0, dtype=torch.int64), "holds no token"),
    (torch.tensor([[3, 49152]]), "ids: from 3 to 49152; the vocabulary has 0 to 49151"),
    (torch.tensor([[-1, 5]]), "ids: from -1"),
    (torch.zeros(1, 8193, dtype=torch.int64), "8193 tokens .* 8192"),
])
def test_bad_ids(smollm, bad, message):
    with pytest.raises(ValueError, match=message):
        smollm(bad)


def test_bad_caches(smollm, ids):
    cache = smollm.new_cache(10)
    smollm(ids[:, :8], cache)
    with pytest.raises(ValueError, match="8 tokens and 3 new ones .*max_tokens=10"):
        smollm(ids[:, :3], cache)
    assert cache.length == 8
    smollm(ids[:, :2], cache)
    with pytest.raises(ValueError, match="batch of 2, got 1"):
        smollm(ids[:, :2], smollm.new_cache(10, batch=2))
    for size in (0, 8193):
        with pytest.raises(ValueError, match=f"max_tokens={size}: .* 1 to 8192"):
            smollm.new_cache(size)
