"""Read a GGUF file: metadata and tensors of one model.

Format: github.com/ggml-org/ggml, docs/gguf.md. A header, key-value pairs, a
table of tensors, then their data. The file is mapped, not read: a tensor costs
nothing until it is asked for. Quantized tensors are turned back by `gguf`.
"""
from __future__ import annotations

import struct
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# Value types 0 to 12 as `struct` formats; 8 is a string and 9 an array.
_FORMATS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")
_STRING, _ARRAY = 8, 9


class GGUFFile:
    """`metadata` (key to value), and the tensors by name.

    Raises FileNotFoundError, or ValueError if the file is damaged or no GGUF.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"path: there is no file {path}")
        try:
            with open(path, "rb") as self._file:
                self._read_header()
        except (struct.error, IndexError, TypeError, UnicodeError, MemoryError,
                OverflowError) as error:
            raise ValueError(f"path: {path} is damaged: {error}") from None

    def _read_header(self) -> None:
        magic, version, tensors, pairs = self._unpack("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"path: {self.path} is not a GGUF file of version 2 or 3")
        self.metadata = {self._string(): self._value() for _ in range(pairs)}
        self._table = dict(self._tensor_entry() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", 32)
        self._start = -(-self._file.tell() // alignment) * alignment
        self._data = np.memmap(self.path, mode="r")
        for shape, kind, offset in self._table.values():
            if self._start + offset + _nbytes(shape, kind) > self._data.size:
                raise ValueError(f"path: {self.path} is cut short")

    def _unpack(self, fmt: str) -> tuple:
        return struct.unpack("<" + fmt, self._file.read(struct.calcsize("<" + fmt)))

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        return self._file.read(length).decode()

    def _value(self):
        return self._values(*self._unpack("I"), 1)[0]

    def _values(self, kind: int, count: int):
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind == _ARRAY:
            return [list(self._values(*self._unpack("IQ"))) for _ in range(count)]
        return self._unpack(f"{count}{_FORMATS[kind]}")

    def _tensor_entry(self):
        name, (dims,) = self._string(), self._unpack("I")
        # GGUF lists the fastest dimension first, torch and numpy last.
        shape = self._unpack(f"{dims}Q")[::-1]
        kind, offset = self._unpack("IQ")
        return name, (shape, kind, offset)

    def names(self) -> set[str]:
        """Names of the tensors."""
        return set(self._table)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; a matrix is (out, in)."""
        return self._table[name][0]

    def tensor(self, name: str) -> np.ndarray:
        """A tensor in float32, dequantized if it was stored in fewer bits."""
        shape, kind, offset = self._table[name]
        start = self._start + offset
        raw = np.asarray(self._data[start : start + _nbytes(shape, kind)])
        rows = raw.reshape(*shape[:-1], -1)
        return np.array(dequantize(rows, GGMLQuantizationType(kind)), np.float32)


def _nbytes(shape: tuple[int, ...], kind: int) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return prod(shape) // block * size
