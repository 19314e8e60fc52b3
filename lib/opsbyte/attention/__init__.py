"""Attention techniques, one per file: the plain form first, then the fast one."""
from opsbyte.attention.dense import attention, attention_bytes
from opsbyte.attention.flash import flash_attention, merge_partial_attention

__all__ = ["attention", "attention_bytes", "flash_attention", "merge_partial_attention"]
