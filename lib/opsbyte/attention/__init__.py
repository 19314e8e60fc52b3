"""Attention techniques, one per file: the plain form first, then the fast one."""
from opsbyte.attention.compressive import CompressiveMemory, infini_attention
from opsbyte.attention.delta import gated_delta_rule
from opsbyte.attention.dense import attention, attention_bytes
from opsbyte.attention.flash import (
    block_sizes,
    flash_attention,
    flash_bytes,
    merge_partial_attention,
    split_k_attention,
    tile_bytes,
)
from opsbyte.attention.gated import gated_linear_attention
from opsbyte.attention.latent import LatentAttention, LatentCache
from opsbyte.attention.linear import linear_attention, linear_bytes
from opsbyte.attention.output_gate import output_gated_attention
from opsbyte.attention.paged import (
    OutOfBlocks,
    PagedKVCache,
    gathered_attention,
    paged_attention,
    paged_bytes,
)
from opsbyte.attention.rolling import RollingKVCache
from opsbyte.attention.sparse import (
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    selection_mask,
)

__all__ = [
    "CompressiveMemory",
    "LatentAttention",
    "LatentCache",
    "OutOfBlocks",
    "PagedKVCache",
    "RollingKVCache",
    "attention",
    "attention_bytes",
    "block_sizes",
    "compressed_attention",
    "flash_attention",
    "flash_bytes",
    "gated_delta_rule",
    "gated_linear_attention",
    "gathered_attention",
    "infini_attention",
    "linear_attention",
    "linear_bytes",
    "merge_partial_attention",
    "native_sparse_attention",
    "output_gated_attention",
    "paged_attention",
    "paged_bytes",
    "select_blocks",
    "selected_attention",
    "selection_mask",
    "split_k_attention",
    "tile_bytes",
]
