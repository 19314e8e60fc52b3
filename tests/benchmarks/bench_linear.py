"""Chunkwise linear, gated and delta-rule attention against lean recurrent loops.

    pip install -r tests/benchmarks/requirements.txt
    python tests/benchmarks/bench_linear.py

float32 on the CPU. Turns alternate in one process; a figure is a median over
rounds, a ratio the median of the rounds' ratios, so that other work on the
machine, which slows both sides of a round, mostly cancels. All sides are checked
against each other first. Beside each time stands what the machine allows,
measured in the same rounds: FLOPs over the rate of a large matrix product, or
bytes over the rate of a sum over an array that no cache holds, whichever takes
longer; once for the chunkwise form and once for the loop, which needs fewer FLOPs.

Beside each ratio stands the one that the chunkwise form would have at its limit.
Where that is below the target, as for linear attention on the machine tried, these
products at torch's own rate cannot reach it. And the limit is a kind one: it counts
half of each masked square, which torch computes whole.

Exit status 1 if a ratio misses its target.
"""
from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from common import keep_freed_memory, rounds
from opsbyte.attention import (
    gated_delta_rule,
    gated_linear_attention,
    linear_attention,
    linear_bytes,
)

HEADS, DIM, T = 8, 64, 8192
# Least speed-up that we hold ourselves to, by (technique, over what).
TARGETS = {
    ("linear", "loop"): 15, ("gated", "loop"): 10, ("delta", "loop"): 8,
    ("delta", "transformers"): 1.5,
}
SIDES: dict[str, dict[str, Callable]] = {"linear": {}, "gated": {}, "delta": {}}
CHUNK = {"linear": 64, "gated": 32, "delta": 32}  # the defaults


def side(technique: str) -> Callable:
    return lambda f: SIDES[technique].setdefault(f.__name__.split("_", 1)[1], f)


def steps(*tensors) -> zip:
    """Each step's `(H, rows, columns)`, contiguous: nothing to slice in the loop."""
    return zip(*(x.transpose(0, 1).contiguous().unbind() for x in tensors), strict=True)


@side("linear")
def linear_loop(q, k, v, beta, g):
    """Two operators a step, both in place."""
    S, out = torch.zeros(HEADS, DIM, DIM), torch.empty(T, HEADS, 1, DIM)
    tiles = steps(q.unsqueeze(2), k.unsqueeze(3), v.unsqueeze(2))
    for (q, k, v), answer in zip(tiles, out.unbind(), strict=True):
        S.baddbmm_(k, v)
        torch.bmm(q, S, out=answer)
    return out.squeeze(2).transpose(0, 1)


@side("gated")
def gated_loop(q, k, v, beta, g):
    """Three: a decay per head does not fit into the product's scalar."""
    S, out = torch.zeros(HEADS, DIM, DIM), torch.empty(T, HEADS, 1, DIM)
    fade = g.exp()[:, :, None, None]
    tiles = steps(q.unsqueeze(2), k.unsqueeze(3), v.unsqueeze(2), fade)
    for (q, k, v, fade), answer in zip(tiles, out.unbind(), strict=True):
        S.mul_(fade).baddbmm_(k, v)
        torch.bmm(q, S, out=answer)
    return out.squeeze(2).transpose(0, 1)


@side("delta")
def delta_loop(q, k, v, beta, g):
    """Four: u = β v − (β k)ᵀ S is one, with β applied before the loop."""
    S, out = torch.zeros(HEADS, DIM, DIM), torch.empty(T, HEADS, 1, DIM)
    fade, beta, u = g.exp()[:, :, None, None], beta[..., None], torch.empty_like(out[0])
    tiles = steps(q.unsqueeze(2), k.unsqueeze(3), (beta * k).unsqueeze(2),
                  (beta * v).unsqueeze(2), fade)
    for (q, k, beta_k, beta_v, fade), answer in zip(tiles, out.unbind(), strict=True):
        S.mul_(fade)
        torch.baddbmm(beta_v, beta_k, S, alpha=-1, out=u)
        S.baddbmm_(k, u)
        torch.bmm(q, S, out=answer)
    return out.squeeze(2).transpose(0, 1)


@side("linear")
def linear_chunkwise(q, k, v, beta, g, **form):
    plain = {"feature_map": "identity", "normalize": False}
    return linear_attention(q[None], k[None], v[None], **plain, **form)[0]


@side("gated")
def gated_chunkwise(q, k, v, beta, g, **form):
    return gated_linear_attention(*(x[None] for x in (q, k, v, g)), **form)[0]


@side("delta")
def delta_chunkwise(q, k, v, beta, g, **form):
    return gated_delta_rule(*(x[None] for x in (q, k, v, beta, g)), **form)[0]


@side("delta")
def delta_transformers(q, k, v, beta, g):
    """Qwen3-Next's, which scales the queries by 1/sqrt(dim); ours does not."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    # its layout is (batch, time, heads, dim)
    q, k, v, beta, g = (x[None].transpose(1, 2) for x in (q * DIM**0.5, k, v, beta, g))
    out, _ = qwen.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    return out[0].transpose(0, 1)


def add_definitions() -> None:
    """The library's recurrent forms, written to be read: not a target."""
    for sides in SIDES.values():
        sides["definition"] = partial(sides["chunkwise"], form="recurrent")


def inputs() -> list[torch.Tensor]:
    """q, unit k, v `(H, T, D)`, beta, log-decay `(H, T)`."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(HEADS, T, DIM) for _ in range(3))
    beta, g = torch.rand(HEADS, T), -0.1 * torch.rand(HEADS, T)
    return [q, F.normalize(k, dim=-1), v, beta, g]


def flops(technique: str, chunk: int) -> float:
    """Of the matrix products, a multiply-add 2; half of each square is masked.

    A loop, chunk None: read and write the state, and for delta recall from it.
    """
    C, D = chunk, DIM
    if C is None:
        return T * HEADS * 2 * D * D * (3 if technique == "delta" else 2)
    square = 2 * C * C * D / 2                   # q kᵀ and weights · v, both
    state = 2 * C * D * D                        # read, write
    per_chunk = 2 * square + 2 * state
    if technique == "delta":                     # k kᵀ, inverse, its use; k S
        per_chunk += 2 * square + C**3 / 3 + state
    return T / C * HEADS * per_chunk


def compare(technique: str, tensors: list, count: int) -> dict[tuple[str, str], tuple]:
    """By what factor the chunkwise form is faster, and would be at its limit."""
    sides = SIDES[technique]
    answers = {name: f(*tensors) for name, f in sides.items()}
    for answer in answers.values():
        scale = answers["loop"].abs().max().item()
        torch.testing.assert_close(
            answer, answers["loop"], rtol=1e-4, atol=1e-5 * scale
        )
    a, stream = torch.randn(2048, 2048), torch.ones(64 * 2**20)
    forms = {name: partial(f, *tensors) for name, f in sides.items()}
    forms |= {"gemm": lambda: a @ a, "stream": stream.sum}
    seconds = rounds(forms, count)

    peak = 2 * 2048**3 / median(seconds["gemm"])
    bandwidth = stream.nbytes / median(seconds["stream"])
    print(f"{technique}: {HEADS} heads of {DIM}, T = {T:,};"
          f" here {peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.0f} GB/s")
    moved = linear_bytes(batch=1, heads=HEADS, kv_heads=HEADS, tokens=T, key_dim=DIM,
                         value_dim=DIM, chunk=T, itemsize=4)  # the state stays in cache
    limit, ratios = {}, {}
    for name in sides:
        chunk = CHUNK[technique] if name == "chunkwise" else None
        chunk = 64 if name == "transformers" else chunk
        work, time = flops(technique, chunk), median(seconds[name])
        limit[name] = max(work / peak, moved / bandwidth)
        print(f"  {name:13}{time * 1e3:8.1f} ms   limit {limit[name] * 1e3:5.1f} ms"
              f" ({work / 1e9:.2f} GFLOP, {moved / 1e6:.0f} MB), reached"
              f" {limit[name] / time:6.1%}")
    for name in sorted(sides.keys() - {"chunkwise"}):
        turns = zip(seconds[name], seconds["chunkwise"], strict=True)
        best = median(seconds[name]) / limit["chunkwise"]
        ratios[technique, name] = median(a / b for a, b in turns), best
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_grad_enabled(False)
    print(f"torch {torch.__version__}, {platform.machine()},"
          f" {torch.get_num_threads()} threads")
    add_definitions()
    tensors, ratios = inputs(), {}
    for technique in SIDES:
        ratios |= compare(technique, tensors, options.rounds)
    print("chunkwise is faster by")
    for key, (ratio, best) in ratios.items():
        target = TARGETS.get(key)
        verdict = "" if target is None else (
            f"  at least {target:4.1f}  {'ok' if ratio >= target else 'MISSED'}"
        )
        print(f"  {key[0]:7} than {key[1]:13}{ratio:6.2f}"
              f"  (at its limit {best:5.1f}){verdict}")
    return int(any(ratios[key][0] < target for key, target in TARGETS.items()))


if __name__ == "__main__":
    sys.exit(main())
