"""The course's transformer against Hugging Face transformers.

    pip install -r tests/benchmarks/requirements.txt
    python tests/benchmarks/bench_llm.py

Same weights, same process, turns alternating; times are medians, a ratio is the
median of the rounds' ratios. Both use a key-value cache; transformers uses
torch's attention operator. Run it on a machine that is otherwise idle. Exit
status 1 if a ratio misses its target.
"""
from __future__ import annotations

import argparse
import platform
import sys
from statistics import median
from time import perf_counter

import torch
from opsbyte import llm
from opsbyte.llm.fetch import fetch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

READ_BYTES = 1 << 28  # more than any processor's cache holds

# Least speed-up over transformers that we hold ourselves to.
TARGETS = {
    ("fp32", "prefill"): 1.1, ("bf16", "prefill"): 1.3,
    ("fp32", "decode"): 1.3, ("bf16", "decode"): 1.9,
}


def reference(weights: llm.Weights, dtype: torch.dtype) -> LlamaForCausalLM:
    """The same model in transformers, filled with our weights."""
    config, mixer = weights.config, weights.config.layers[0].mixer
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.d_model,
        intermediate_size=config.layers[0].mlp.width,
        num_hidden_layers=len(config.layers),
        num_attention_heads=mixer.heads,
        num_key_value_heads=mixer.kv_heads,
        max_position_embeddings=config.max_tokens,
        rms_norm_eps=weights.eps,
        rope_parameters={
            "rope_type": "default",
            # frequencies[1] = base^(-2 / head_dim)
            "rope_theta": weights.frequencies[1].item() ** (-mixer.head_dim / 2),
        },
        tie_word_embeddings=config.tied,
        attn_implementation="sdpa",
    ))
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for ours, theirs in names.items():
        if theirs.startswith("model."):
            state[f"{theirs}.weight"] = weights.tensor(ours)
            continue
        for i in range(len(config.layers)):
            tensor = weights.tensor(f"blk.{i}.{ours}")
            if ours in ("attn_q", "attn_k"):  # pairs from neighbours to halves
                halves = tensor.unflatten(0, (-1, mixer.head_dim // 2, 2))
                tensor = halves.transpose(1, 2).flatten(0, 2)
            state[f"model.layers.{i}.{theirs}.weight"] = tensor
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.to(dtype).eval()


class Ours:
    """One pass over a prompt, and one over a token, with the course's model."""

    def __init__(self, model: llm.Transformer, room: int):
        self.model, self.room = model, room

    def prefill(self, ids):
        self.cache = self.model.new_cache(self.room)
        return self.model(ids, self.cache, last_only=True)[0, -1]

    def decode(self, ids):
        return self.model(ids, self.cache, last_only=True)[0, -1]


class Theirs:
    """The same with transformers."""

    def __init__(self, model: LlamaForCausalLM):
        self.model = model

    def prefill(self, ids):
        self.cache = DynamicCache(config=self.model.config)
        return self.decode(ids)

    @torch.inference_mode()
    def decode(self, ids):
        out = self.model(
            ids, cache=self.cache, use_cache=True, logits_to_keep=1
        )
        return out.logits[0, -1]


def timed(function, *arguments) -> float:
    start = perf_counter()
    function(*arguments)
    return perf_counter() - start


def compare(ours: Ours, theirs: Theirs, prompt, context: int, rounds: int) -> dict:
    """Median seconds of both sides, taking turns, and the bandwidth (bytes/s).

    {"prefill": (ours, theirs, ratio), "decode": the same, "bandwidth": …}
    """
    sides = (ours, theirs)
    logits = [side.prefill(prompt) for side in sides]
    agree = torch.nn.functional.cosine_similarity(*(x.float() for x in logits), dim=0)
    assert agree > 0.999, f"the two models differ: cosine {agree}"
    token = logits[0].argmax().view(1, 1)
    prefill = [[timed(side.prefill, prompt) for side in sides] for _ in range(rounds)]
    for side in sides:
        side.prefill(prompt[:, :context])
        for _ in range(4):
            side.decode(token)
    # Reading memory takes its turn too: what others on the machine use is then
    # missing from all three alike.
    data = torch.ones(READ_BYTES // 4)
    decode = [
        [*(timed(side.decode, token) for side in sides), timed(data.sum)]
        for _ in range(16 * rounds)
    ]
    return {
        "prefill": summary(prefill),
        "decode": summary(decode),
        "bandwidth": READ_BYTES / median(read for *_, read in decode),
    }


def summary(turns: list) -> tuple[float, float, float]:
    """Medians of our seconds, their seconds, and of the ratio within a round."""
    return (
        median(ours for ours, *_ in turns),
        median(theirs for _, theirs, *_ in turns),
        median(theirs / ours for ours, theirs, *_ in turns),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="prompt length")
    parser.add_argument("--context", type=int, default=128, help="cached for decode")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    weights = llm.read(fetch())
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads; {options.tokens} tokens of prefill, "
          f"decode at batch 1 after {options.context}")
    torch.manual_seed(0)
    prompt = torch.randint(100, weights.config.vocab, (1, options.tokens))
    parameters = weights.config.parameters()
    missed = 0
    for name in ("fp32", "bf16"):
        model = llm.load(name)
        room = options.tokens + 20 * options.rounds + 8
        result = compare(
            Ours(model, room), Theirs(reference(weights, model.dtype)), prompt,
            options.context, options.rounds,
        )
        for phase in ("prefill", "decode"):
            (ours, theirs, ratio), target = result[phase], TARGETS[name, phase]
            missed += ratio < target
            print(f"{name} {phase:8}{ours * 1e3:8.1f} ms, transformers "
                  f"{theirs * 1e3:8.1f} ms: {ratio:.2f} times (target {target})")
        rate = parameters * model.dtype.itemsize / result["decode"][0]
        reached = result["bandwidth"]
        print(f"{name} decode reads {rate / 1e9:.1f} GB/s of weights, "
              f"{rate / reached:.0%} of the {reached / 1e9:.1f} GB/s of a plain sum")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
