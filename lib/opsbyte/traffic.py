"""Count the bytes that an algorithm moves between slow and fast memory.

A tiled algorithm calls `load` for what it brings into fast memory and `store`
for what it writes back. What happens inside fast memory is free. The counts
are exact integers, so a test can hold them equal to a formula; the formulas
stand beside each technique (`attention_bytes` in `attention/dense.py`, …).
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes moved so far: `loaded` into fast memory, `stored` to slow memory.

    >>> traffic = Traffic()
    >>> traffic.load(1024)              # bytes, or a tensor (all its elements)
    >>> traffic.store(256)
    >>> traffic.loaded, traffic.stored, traffic.bytes
    (1024, 256, 1280)
    """

    loaded: int = 0
    stored: int = 0

    @property
    def bytes(self) -> int:
        """Loads and stores together."""
        return self.loaded + self.stored

    def load(self, *moved) -> None:
        """Count tensors or numbers of bytes brought into fast memory."""
        self.loaded += sum(map(_bytes, moved))

    def store(self, *moved) -> None:
        """Count tensors or numbers of bytes written to slow memory."""
        self.stored += sum(map(_bytes, moved))


def _bytes(moved) -> int:
    """Bytes of a tensor's elements (a view counts what it shows)."""
    if hasattr(moved, "element_size"):
        return moved.numel() * moved.element_size()
    if isinstance(moved, bool) or not isinstance(moved, int) or moved < 0:
        raise ValueError(
            f"traffic: got {moved!r}, want a tensor or a whole number of bytes"
        )
    return moved
