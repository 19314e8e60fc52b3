"""Flash and paged attention against torch's operator and the plain form.

    python tests/benchmarks/bench_attention.py

float32 on the CPU. Turns alternate in one process; a figure is a median over
rounds, a ratio the median of the rounds' ratios, so that other work on the
machine, which slows both sides of a round, mostly cancels. Beside each time
stands what the machine allows, measured in the same rounds: FLOPs over the best
rate of a large matrix product, or bytes over the best rate of a sum over an
array that no cache holds, whichever takes longer.

Memory: a form runs once in a child process of its own. Its peak extra memory
is the growth of that process's largest resident set from before the call, with
inputs made and a small call done, to after it; the result is part of it.

The paged ratio depends on where the cores sit: one core may copy what another
multiplies, and if they share no cache the copy crosses between their caches.

Exit status 1 if a ratio misses its target.
"""
from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from statistics import median

import torch
import torch.nn.functional as F
from common import largest_resident_set, rounds
from opsbyte.attention import (
    PagedKVCache,
    attention,
    flash_attention,
    flash_bytes,
    gathered_attention,
    paged_attention,
    paged_bytes,
)

HEADS, DIM, T = 8, 64, 8192               # prefill
BATCH, CONTEXT, BLOCK = 32, 2048, 16      # decode
TARGETS = {                               # at most
    "flash / torch": 2.0, "flash / plain memory": 0.05, "paged / contiguous": 3.0,
}
FORMS = {
    "plain": attention,
    "flash": flash_attention,
    "torch": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
}


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> float:
    pairs = zip(seconds[name], seconds[base], strict=True)
    return median(a / b for a, b in pairs)


def inputs(time: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, time, DIM) for _ in range(3)]


def machine() -> tuple[dict, float, float]:
    """Forms that show what the machine can do; their FLOPs, their bytes."""
    a, stream = torch.randn(2048, 2048), torch.ones(64 * 2**20)
    probes = {"gemm": lambda: a @ a, "stream": stream.sum}
    return probes, 2 * 2048**3, stream.nbytes


def report(seconds, names, flops, moved, gemm_flops, stream_bytes) -> None:
    """Print each form's time beside the least that the machine allows."""
    peak = gemm_flops / min(seconds["gemm"])
    bandwidth = stream_bytes / min(seconds["stream"])
    compute, memory = flops / peak, moved / bandwidth
    limit = max(compute, memory)
    print(f"  machine     {peak / 1e9:8.1f} GFLOP/s  {bandwidth / 1e9:.1f} GB/s")
    print(f"  limit       {limit * 1e3:8.2f} ms: {flops / 1e9:.2f} GFLOP take"
          f" {compute * 1e3:.2f} ms, {moved / 1e6:.1f} MB take {memory * 1e3:.2f} ms")
    for name in names:
        time = median(seconds[name])
        print(f"  {name:11} {time * 1e3:8.2f} ms  {limit / time:6.1%} of the limit")


def prefill(count: int) -> dict[str, float]:
    print(f"Prefill: {HEADS} heads of {DIM}, T = {T:,}, causal")
    q, k, v = inputs(T)
    probes, *capacity = machine()
    forms = {name: lambda f=form: f(q, k, v) for name, form in FORMS.items()}
    plain = rounds({"plain": forms.pop("plain")}, 1)
    seconds = rounds(forms | probes, count) | plain
    flops = 4 * DIM * HEADS * T * (T + 1) // 2
    moved = flash_bytes(batch=1, heads=HEADS, kv_heads=HEADS, queries=T, keys=T,
                        head_dim=DIM, itemsize=4)
    report(seconds, FORMS, flops, moved, *capacity)
    return {"flash / torch": ratio(seconds, "flash", "torch")}


def memory() -> dict[str, float]:
    size = HEADS * T * DIM * 4
    print(f"Peak extra memory, the same shape; the result alone is {size / 1e6:.1f} MB")
    extra = {}
    for name in FORMS:
        child = [sys.executable, __file__, "--peak", name]
        extra[name] = int(subprocess.check_output(child, text=True))
        print(f"  {name:11} {extra[name] / 1e6:8.1f} MB")
    return {"flash / plain memory": extra["flash"] / extra["plain"]}


def peak(name: str) -> int:
    """Bytes by which one call raises this process's largest resident set."""
    FORMS[name](*inputs(64))
    tensors = inputs(T)
    before = largest_resident_set()
    FORMS[name](*tensors)
    return largest_resident_set() - before


def decode(count: int) -> dict[str, float]:
    print(f"Decode: batch {BATCH}, {CONTEXT:,} tokens each, {HEADS} heads of {DIM},"
          f" blocks of {BLOCK}")
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, 1, DIM)
    k, v = torch.randn(2, BATCH, HEADS, CONTEXT, DIM)
    cache = PagedKVCache(BATCH * CONTEXT // BLOCK, BLOCK, HEADS, DIM)
    seqs = [cache.add() for _ in range(BATCH)]
    for start in range(0, CONTEXT, BLOCK):        # in turns: neighbours are strangers
        for b, seq in enumerate(seqs):
            new = [x[b, :, start : start + BLOCK].transpose(0, 1) for x in (k, v)]
            cache.append(seq, *new)
    kv_lens, tables = cache.batch(seqs)
    pages = q[:, :, 0], cache.keys[0], cache.values[0], [1] * BATCH, kv_lens, tables
    torch.testing.assert_close(paged_attention(*pages), attention(q, k, v)[:, :, 0])

    probes, *capacity = machine()
    forms = {
        "torch": lambda: F.scaled_dot_product_attention(q, k, v),
        "dense": lambda: attention(q, k, v),
        "gathered": lambda: gathered_attention(*pages),
        "paged": lambda: paged_attention(*pages),
    }
    seconds = rounds(forms | probes, count)
    moved = paged_bytes([1] * BATCH, kv_lens, heads=HEADS, kv_heads=HEADS, head_dim=DIM,
                        itemsize=4, block_size=BLOCK)
    report(seconds, forms, 4 * k.numel(), moved, *capacity)
    contiguous = min("torch", "dense", key=lambda name: median(seconds[name]))
    print(f"  contiguous is {contiguous}, the faster of torch and dense")
    return {"paged / contiguous": ratio(seconds, "paged", contiguous)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peak", choices=FORMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak(options.peak))
        return 0
    print(f"torch {torch.__version__}, {platform.machine()},"
          f" {torch.get_num_threads()} threads")
    results = prefill(options.rounds) | memory() | decode(3 * options.rounds)
    for name, value in results.items():
        verdict = "ok" if value <= TARGETS[name] else "MISSED"
        print(f"{name:22} {value:6.3f}  at most {TARGETS[name]:5.2f}  {verdict}")
    return int(any(value > TARGETS[name] for name, value in results.items()))


if __name__ == "__main__":
    sys.exit(main())
