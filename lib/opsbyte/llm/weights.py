"""A Llama-architecture model as its GGUF file describes it.

Whatever this reader does not understand it refuses, so that no model is
silently wrong.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from opsbyte.models import MLP, Attention, Layer, ModelConfig

from .gguf_file import GGUFFile
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Weights:
    """A model's shape and numbers, before anything is laid out for speed.

    `tensor(name)` gives a tensor in float32, matrices as (out, in), under its
    GGUF name without ".weight": token_embd, blk.0.attn_q, …. `frequencies`
    (head_dim / 2,) are radians per position of each rotary pair, `eps` is the
    constant in RMSNorm. GGUF orders the rows of q and k so that the two elements
    of a rotary pair are neighbours.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    eps: float
    frequencies: torch.Tensor
    tensor: Callable[[str], torch.Tensor]


def read(path: str | Path) -> Weights:
    """Read the GGUF file at `path`; tensors are converted when asked for.

    Raises FileNotFoundError, or ValueError for a file that is no GGUF, or not
    of the plain Llama architecture (other layers, experts, biases).
    """
    file = GGUFFile(path)
    metadata = file.metadata

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(file.tensor(f"{name}.weight"))

    try:
        config = _config(file)
        return Weights(
            config=config,
            tokenizer=Tokenizer(metadata),
            eps=metadata["llama.attention.layer_norm_rms_epsilon"],
            frequencies=_frequencies(file, config.layers[0].mixer.head_dim),
            tensor=tensor,
        )
    except KeyError as error:
        raise ValueError(f"path: the metadata of {path} lack {error}") from None


def _config(file: GGUFFile) -> ModelConfig:
    metadata = file.metadata
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ValueError(
            f"path: architecture {architecture!r} is not supported, only 'llama'"
        )
    layers = metadata["llama.block_count"]
    heads = metadata["llama.attention.head_count"]
    kv_heads = metadata.get("llama.attention.head_count_kv", heads)
    width = metadata["llama.feed_forward_length"]
    d_model = metadata["llama.embedding_length"]
    if any(isinstance(value, list) for value in (heads, kv_heads, width)):
        raise ValueError("path: layers of different shapes are not supported")
    head_dim = metadata.get("llama.attention.key_length", d_model // heads)
    config = ModelConfig(
        name=metadata.get("general.name", file.path.stem),
        d_model=d_model,
        vocab=len(metadata["tokenizer.ggml.tokens"]),
        layers=(Layer(Attention(heads, kv_heads, head_dim), MLP(width)),) * layers,
        tied="output.weight" not in file.names(),
        max_tokens=metadata["llama.context_length"],
    )
    _check_tensors(file, config)
    return config


def _check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Refuse a file with tensors missing, unknown (experts, biases), or misshapen."""
    mixer, mlp = config.layers[0].mixer, config.layers[0].mlp
    d, q = config.d_model, mixer.heads * mixer.head_dim
    kv = mixer.kv_heads * mixer.head_dim
    needed = {"token_embd": (config.vocab, d), "output_norm": (d,)}
    if not config.tied:
        needed["output"] = (config.vocab, d)
    of_layer = {
        "attn_norm": (d,), "attn_q": (q, d), "attn_k": (kv, d), "attn_v": (kv, d),
        "attn_output": (d, q), "ffn_norm": (d,), "ffn_gate": (mlp.width, d),
        "ffn_up": (mlp.width, d), "ffn_down": (d, mlp.width),
    }
    for i in range(len(config.layers)):
        needed |= {f"blk.{i}.{name}": shape for name, shape in of_layer.items()}
    needed = {f"{name}.weight": shape for name, shape in needed.items()}
    if missing := sorted(needed.keys() - file.names()):
        raise ValueError(f"path: the file lacks the tensors {missing[:5]}")
    if unknown := sorted(file.names() - needed.keys() - {"rope_freqs.weight"}):
        raise ValueError(f"path: tensors {unknown[:5]} are not those of a plain Llama")
    for name, shape in needed.items():
        if file.shape(name) != shape:
            raise ValueError(
                f"path: tensor {name} has shape {file.shape(name)}, not {shape}"
            )


def _frequencies(file: GGUFFile, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotary pair (arXiv 2104.09864, section 3.2.2)."""
    metadata = file.metadata
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ValueError("path: rotary angles on part of a head are not supported")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    linear = metadata.get("llama.rope.scale_linear", 1.0)
    if scaling != "none" or linear != 1.0:
        raise ValueError(f"path: rope scaling {scaling!r} ({linear}) is not supported")
    base = metadata.get("llama.rope.freq_base", 10000.0)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = base**-exponents
    if "rope_freqs.weight" in file.names():  # Llama 3.1 and later: divisors
        frequencies /= torch.from_numpy(file.tensor("rope_freqs.weight"))
    return frequencies
