"""Read a Llama-architecture model out of one GGUF file.

GGUF (github.com/ggml-org/ggml, docs/gguf.md) holds metadata, tokenizer and
tensors, most of them quantized; `gguf` turns those back into float32. Whatever
this reader does not understand it refuses, so that no model is silently wrong.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from opsbyte.models import MLP, Attention, Layer, ModelConfig

from .tokenizer import Tokenizer

_MODEL_TENSORS = {
    "token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight",
    "attn_output.weight", "ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight",
    "ffn_down.weight",
}


@dataclass(frozen=True)
class Weights:
    """A model's shape and numbers, before anything is laid out for speed.

    `tensor(name)` gives a tensor under its GGUF name in float32, matrices as
    (out, in); `frequencies` (head_dim / 2,) are radians per position of each
    rotary pair, `eps` the constant in RMSNorm. GGUF orders the rows of q and k
    so that the two elements of a rotary pair are neighbours.
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
    from gguf import GGUFReader
    from gguf.quants import dequantize

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path: no file at {path}")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"path: {path} is no complete GGUF file: {error}") from None
    metadata = _Metadata(reader)
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def tensor(name: str) -> torch.Tensor:
        data = dequantize(stored[name].data, stored[name].tensor_type)
        return torch.from_numpy(data.copy() if not data.flags.writeable else data)

    config = _config(metadata, stored, name=path.stem)
    return Weights(
        config=config,
        tokenizer=Tokenizer(metadata),
        eps=metadata("llama.attention.layer_norm_rms_epsilon"),
        frequencies=_frequencies(metadata, config, stored, tensor),
        tensor=tensor,
    )


class _Metadata:
    """Values of a GGUF file's metadata by key."""

    def __init__(self, reader):
        self._fields = reader.fields

    def __call__(self, key: str, default=None):
        """The value of `key`; ValueError if it is missing without a default."""
        if key in self._fields:
            return self._fields[key].contents()
        if default is None:
            raise ValueError(f"path: the GGUF metadata lack {key!r}")
        return default

    def __contains__(self, key: str) -> bool:
        return key in self._fields


def _config(metadata: _Metadata, stored: dict, name: str) -> ModelConfig:
    architecture = metadata("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"path: architecture {architecture!r} is not supported, only 'llama'"
        )
    if metadata("llama.expert_count", 0):
        raise ValueError("path: a mixture of experts is not supported")
    layers = metadata("llama.block_count")
    heads = metadata("llama.attention.head_count")
    kv_heads = metadata("llama.attention.head_count_kv", heads)
    width = metadata("llama.feed_forward_length")
    if any(isinstance(value, list) for value in (heads, kv_heads, width)):
        raise ValueError("path: layers of different shapes are not supported")
    d_model = metadata("llama.embedding_length")
    head_dim = metadata("llama.attention.key_length", d_model // heads)
    _check_tensors(stored, layers)
    return ModelConfig(
        name=metadata("general.name", name),
        d_model=d_model,
        vocab=int(stored["token_embd.weight"].shape[1]),
        layers=(Layer(Attention(heads, kv_heads, head_dim), MLP(width)),) * layers,
        tied="output.weight" not in stored,
        max_tokens=metadata("llama.context_length"),
    )


def _check_tensors(stored: dict, layers: int) -> None:
    needed = {f"blk.{i}.{name}" for i in range(layers) for name in _LAYER_TENSORS}
    needed |= {"token_embd.weight", "output_norm.weight"}
    if missing := sorted(needed - stored.keys()):
        raise ValueError(f"path: the file lacks the tensors {missing[:5]}")
    if unknown := sorted(stored.keys() - needed - _MODEL_TENSORS):
        raise ValueError(f"path: tensors {unknown[:5]} are not those of a plain Llama")


def _frequencies(metadata, config: ModelConfig, stored: dict, tensor) -> torch.Tensor:
    """Radians per position of each rotary pair (arXiv 2104.09864, section 3.2.2)."""
    head_dim = config.layers[0].mixer.head_dim
    if metadata("llama.rope.dimension_count", head_dim) != head_dim:
        raise ValueError("path: rotary angles on part of a head are not supported")
    scaling = metadata("llama.rope.scaling.type", "none")
    linear = metadata("llama.rope.scale_linear", 1.0)
    if scaling != "none" or linear != 1.0:
        raise ValueError(f"path: rope scaling {scaling!r} ({linear}) is not supported")
    base = metadata("llama.rope.freq_base", 10000.0)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = base**-exponents
    if "rope_freqs.weight" in stored:  # Llama 3.1 and later: a divisor per pair
        frequencies = frequencies / tensor("rope_freqs.weight").double()
    return frequencies
