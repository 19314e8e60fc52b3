"""A Llama-architecture model as its GGUF file describes it.

Whatever this reader does not understand it refuses, so that no model is
silently wrong.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from opsbyte.models import MLP, Attention, Layer, ModelConfig

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
    metadata, tensors = _open(path)
    try:
        config = _config(metadata, tensors, name=Path(path).stem)
        return Weights(
            config=config,
            tokenizer=Tokenizer(metadata),
            eps=metadata["llama.attention.layer_norm_rms_epsilon"],
            frequencies=_frequencies(
                metadata, tensors, config.layers[0].mixer.head_dim
            ),
            tensor=lambda name: _tensor(tensors[f"{name}.weight"]),
        )
    except KeyError as error:
        raise ValueError(f"path: the metadata of {path} lack {error}") from None


def _open(path: str | Path) -> tuple[dict, dict[str, ReaderTensor]]:
    """Metadata and tensors by their names. The data stay in the file, mapped.

    The reader itself is let go: it keeps an array for every token of the vocabulary.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"path: there is no file {path}")
    try:
        reader = GGUFReader(path)
        if reader.byte_order != "I":
            raise ValueError("its byte order is not this machine's")
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(
            f"path: {path} is no GGUF file, or damaged: {error}"
        ) from None
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _tensor(tensor: ReaderTensor) -> torch.Tensor:
    """Read a tensor in float32, dequantized if it was stored in fewer bits."""
    data = np.asarray(tensor.data)  # slices of a plain array cost less than a memmap's
    values = dequantize(data, tensor.tensor_type)
    return torch.from_numpy(np.array(values, np.float32))


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """GGUF lists the fastest dimension first, torch last: a matrix is (out, in)."""
    return tuple(tensor.shape.tolist()[::-1])


def _config(metadata: dict, tensors: dict, name: str) -> ModelConfig:
    """The model's shape; `name` if the file does not say its own."""
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
        name=metadata.get("general.name", name),
        d_model=d_model,
        vocab=len(metadata["tokenizer.ggml.tokens"]),
        layers=(Layer(Attention(heads, kv_heads, head_dim), MLP(width)),) * layers,
        tied="output.weight" not in tensors,
        max_tokens=metadata["llama.context_length"],
    )
    _check_tensors(tensors, config)
    return config


def _check_tensors(tensors: dict, config: ModelConfig) -> None:
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
    if missing := sorted(needed.keys() - tensors.keys()):
        raise ValueError(f"path: the file lacks the tensors {missing[:5]}")
    if unknown := sorted(tensors.keys() - needed.keys() - {"rope_freqs.weight"}):
        raise ValueError(f"path: tensors {unknown[:5]} are not those of a plain Llama")
    for name, shape in needed.items():
        if (found := _shape(tensors[name])) != shape:
            raise ValueError(f"path: tensor {name} has shape {found}, not {shape}")


def _frequencies(metadata: dict, tensors: dict, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotary pair (arXiv 2104.09864, section 3.2.2)."""
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ValueError("path: rotary angles on part of a head are not supported")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    linear = metadata.get("llama.rope.scale_linear", 1.0)
    if scaling != "none" or linear != 1.0:
        raise ValueError(f"path: rope scaling {scaling!r} ({linear}) is not supported")
    base = metadata.get("llama.rope.freq_base", 10000.0)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = base**-exponents
    if "rope_freqs.weight" in tensors:  # Llama 3.1 and later: divisors
        frequencies /= _tensor(tensors["rope_freqs.weight"])
    return frequencies
