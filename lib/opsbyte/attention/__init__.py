"""Attention techniques, one per file: the plain form first, then the fast one."""
from opsbyte.attention.dense import attention, attention_bytes
from opsbyte.attention.flash import (
    block_sizes,
    flash_attention,
    flash_bytes,
    merge_partial_attention,
    split_k_attention,
    tile_bytes,
)
from opsbyte.attention.paged import (
    OutOfBlocks,
    PagedKVCache,
    gathered_attention,
    paged_attention,
    paged_bytes,
)
from opsbyte.attention.rolling import RollingKVCache

__all__ = [
    "OutOfBlocks",
    "PagedKVCache",
    "RollingKVCache",
    "attention",
    "attention_bytes",
    "block_sizes",
    "flash_attention",
    "flash_bytes",
    "gathered_attention",
    "merge_partial_attention",
    "paged_attention",
    "paged_bytes",
    "split_k_attention",
    "tile_bytes",
]
