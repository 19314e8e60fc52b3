"""PagedAttention: the cache in blocks, found through a table.

Kwon et al. 2023, arXiv 2309.06180, sections 4.1 to 4.4.

A cache that is reserved for the longest possible answer stays mostly empty. So
cut memory into blocks of a few tokens, as an operating system cuts it into
pages; give a sequence its next block when the last is full; and keep a table
of the blocks that it has. Then sequences can also share blocks: a counter says
how many tables hold each, and a shared one is copied before it is written.
"""
from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from opsbyte.attention import _check
from opsbyte.attention.dense import attention
from opsbyte.attention.flash import key_tiles, keys_loaded, online_softmax
from opsbyte.traffic import Traffic


def gathered_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_lens: Sequence[int] | Tensor,
    kv_lens: Sequence[int] | Tensor,
    block_tables: Tensor,
    **options,
) -> Tensor:
    """`paged_attention`, the plain way: copy each sequence together, attend.

    Options as `opsbyte.attention.attention`. The copy reads, writes and reads
    again what `paged_attention` reads once.
    """
    outs = []
    for q, table, kv_len in _sequences(
        query, key_cache, value_cache, query_lens, kv_lens, block_tables
    ):
        k, v = gather(key_cache, table, kv_len), gather(value_cache, table, kv_len)
        outs.append(attention(q, k, v, **options)[0].transpose(0, 1))
    return torch.cat(outs) if outs else _nothing(query, value_cache)


@torch.no_grad()
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_lens: Sequence[int] | Tensor,
    kv_lens: Sequence[int] | Tensor,
    block_tables: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    block_q: int = 256,
    block_k: int = 1024,
    traffic: Traffic | None = None,
) -> Tensor:
    """FlashAttention whose tiles of keys come through the block table.

    query `(sum of query_lens, Hq, D)`: the last query_lens[s] tokens of each
    sequence s, one sequence after the other. Caches `(blocks, block size, Hkv,
    D)` and `(…, Dv)`. Sequence s has kv_lens[s] tokens (its queries' own
    included) in the blocks block_tables[s] `(S, most blocks)`; entries beyond
    them are not read. Returns `(sum of query_lens, Hq, Dv)`.

    block_q, block_k: tokens a tile; block_k is rounded down to whole blocks,
    at least one. Other options as `opsbyte.attention.attention`; no gradients.
    traffic: counts whole blocks and table entries, as `paged_bytes` predicts.
    Raises ValueError if shapes, lengths, tables or options do not fit.
    """
    _check.check_mask(causal, window, sinks)
    _check.check_count("block_q", block_q)
    _check.check_count("block_k", block_k)
    scale = _check.resolve_scale(scale, query.shape[-1])
    mask = {"causal": causal, "window": window, "sinks": sinks}
    sequences = _sequences(
        query, key_cache, value_cache, query_lens, kv_lens, block_tables
    )
    size = key_cache.shape[1]
    block_k = max(1, block_k // size) * size
    caches = [key_cache, value_cache]
    buffers = [x.new_empty(block_k // size, *x.shape[1:]) for x in caches]
    outs = []
    for q, table, kv_len in sequences:
        for start in range(0, q.shape[2], block_q):
            rows = q[:, :, start : start + block_q]
            first = kv_len - q.shape[2] + start
            starts = key_tiles(first, rows.shape[2], kv_len, block_k, **mask)
            out, _ = online_softmax(
                rows, _tiles(starts, table, kv_len, caches, buffers, traffic),
                first=first, kv_heads=key_cache.shape[2],
                value_dim=value_cache.shape[3], scale=scale, **mask,
            )
            outs.append(out[0].transpose(0, 1).to(q.dtype))
            if traffic is not None:
                traffic.load(rows), traffic.store(outs[-1])
    return torch.cat(outs) if outs else _nothing(query, value_cache)


def gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Tokens 0 to `length` of a table's blocks, `(1, Hkv, length, D)`.

    In torch this copies; a kernel follows the table as it loads.
    """
    tokens = cache.index_select(0, table).flatten(0, 1)[:length]  # (T, Hkv, D)
    return tokens.transpose(0, 1).unsqueeze(0)


def _tiles(
    starts: list[int], table: Tensor, kv_len: int, caches: list[Tensor],
    buffers: list[Tensor], traffic: Traffic | None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Tiles of whole blocks, copied to buffers small enough for fast memory."""
    blocks, size = buffers[0].shape[:2]
    for start in starts:
        ids = table[start // size :][:blocks]
        tiles = [
            torch.index_select(cache, 0, ids, out=buffer[: len(ids)])
            for cache, buffer in zip(caches, buffers, strict=True)
        ]
        if traffic is not None:
            traffic.load(ids, *tiles)
        k, v = (x.flatten(0, 1)[: kv_len - start].transpose(0, 1)[None] for x in tiles)
        yield start, k, v                                     # (1, Hkv, n, D)


def _sequences(
    query, key_cache, value_cache, query_lens, kv_lens, block_tables
) -> list[tuple[Tensor, Tensor, int]]:
    """Queries `(1, Hq, T, D)`, used table entries and length of each sequence."""
    _check_pages(query, key_cache, value_cache)
    query_lens = _lengths("query_lens", query_lens)
    kv_lens = _lengths("kv_lens", kv_lens)
    tables = torch.as_tensor(block_tables, device=query.device)
    if tables.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"block_tables: got {tables.dtype}, want int32 or int64")
    if tables.dim() != 2 or not len(query_lens) == len(kv_lens) == len(tables):
        raise ValueError(
            f"block_tables: got {tuple(tables.shape)} with {len(query_lens)} query_lens"
            f" and {len(kv_lens)} kv_lens, want one row and one length a sequence"
        )
    if sum(query_lens) != len(query):
        raise ValueError(
            f"query_lens: got a sum of {sum(query_lens)}, want the {len(query)} queries"
        )
    blocks, size = key_cache.shape[:2]
    used = [-(-kv_len // size) for kv_len in kv_lens]
    if max(used, default=0) > tables.shape[1]:
        raise ValueError(
            f"kv_lens: got {max(kv_lens)} tokens, want at most the"
            f" {tables.shape[1] * size} that a row of block_tables has blocks for"
        )
    rows = [table[:n] for table, n in zip(tables, used, strict=True)]
    if rows and ((ids := torch.cat(rows)) < 0).logical_or(ids >= blocks).any():
        raise ValueError(
            f"block_tables: got block {ids.min()} to {ids.max()} of {blocks} blocks"
        )
    queries = query.transpose(0, 1).unsqueeze(0).split(query_lens, 2)
    return list(zip(queries, rows, kv_lens, strict=True))


def _check_pages(query, key_cache, value_cache) -> None:
    """Raise ValueError unless queries and caches fit together."""
    for name, x, dims in (
        ("query", query, "(tokens, heads, dim)"),
        ("key_cache", key_cache, "(blocks, block size, heads, dim)"),
        ("value_cache", value_cache, "(blocks, block size, heads, dim)"),
    ):
        _check.check_dims(name, x, dims)
        _check.check_like(name, x, query)
    if key_cache.shape[:3] != value_cache.shape[:3] or 0 in key_cache.shape[1:]:
        raise ValueError(
            f"value_cache: got {tuple(value_cache.shape)}, want the blocks, block"
            f" size and heads of key_cache, {tuple(key_cache.shape)}, not 0"
        )
    if query.shape[2] != key_cache.shape[3]:
        raise ValueError(
            f"query: got dimension {query.shape[2]}, want {key_cache.shape[3]}"
        )
    _check.check_heads(query.shape[1], key_cache.shape[2])


def _lengths(name: str, lengths) -> list[int]:
    lengths = torch.as_tensor(lengths)
    if lengths.dim() != 1 or lengths.is_floating_point() or (lengths < 0).any():
        raise ValueError(f"{name}: got {lengths.tolist()}, want whole numbers >= 0")
    return lengths.tolist()


def _nothing(query: Tensor, value_cache: Tensor) -> Tensor:
    return query.new_zeros(0, query.shape[1], value_cache.shape[3])


class OutOfBlocks(RuntimeError):
    """No block is free: free a sequence (and compute it again later)."""


class PagedKVCache:
    """Keys and values of many sequences in one pool of blocks.

    `keys` and `values` are `(layers, blocks, block size, Hkv, D)`; all layers
    of a sequence use the same table. A step of a model is one `extend` for
    each sequence, then a `write` for each layer; with one layer `append` does
    both. `add(tokens)` starts a sequence with whatever full blocks `commit`
    has registered for the same first tokens.

    When `OutOfBlocks` is raised nothing has changed. To preempt, `free` a
    sequence and later `add` it and compute it again.
    """

    def __init__(
        self, blocks: int, block_size: int, kv_heads: int, head_dim: int, *,
        layers: int = 1, value_dim: int | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        for name, value in (
            ("blocks", blocks), ("block_size", block_size), ("kv_heads", kv_heads),
            ("head_dim", head_dim), ("value_dim", value_dim), ("layers", layers),
        ):
            _check.check_count(name, value)
        shape = (layers, blocks, block_size, kv_heads)
        self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, value_dim, dtype=dtype, device=device)
        self.block_size = block_size
        self.users = [0] * blocks                   # tables that hold each block
        self._free = dict.fromkeys(range(blocks))   # in the order of reuse
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._block_of: dict[bytes, int] = {}       # registered prefixes
        self._digest_of: dict[int, bytes] = {}
        self._next = 0

    # --- sequences -----------------------------------------------------------

    def add(self, tokens: Sequence[int] = ()) -> int:
        """Start a sequence; returns its number.

        Its `length` is then the number of `tokens` found in registered blocks:
        go on from there. The last token is never among them, for a model needs
        at least one to compute.
        """
        seq, self._next = self._next, self._next + 1
        table = self._tables[seq] = []
        for digest in self._digests(tokens[:-1]):
            if (block := self._block_of.get(digest)) is None:
                break
            self._hold(block)
            table.append(block)
        self._lengths[seq] = len(table) * self.block_size
        return seq

    def fork(self, seq: int) -> int:
        """A second sequence with the same blocks, none of them copied yet."""
        self._known(seq)
        child, self._next = self._next, self._next + 1
        self._tables[child] = list(self._tables[seq])
        self._lengths[child] = self._lengths[seq]
        for block in self._tables[child]:
            self._hold(block)
        return child

    def free(self, seq: int) -> None:
        """Forget a sequence. Registered blocks can be found until reused."""
        self._known(seq)
        for block in reversed(self._tables.pop(seq)):   # ends are reused first
            self._release(block)
        del self._lengths[seq]

    def extend(self, seq: int, tokens: int) -> None:
        """Make room for so many more tokens; copies a shared last block.

        Raises OutOfBlocks, having changed nothing, if there are too few.
        """
        self._known(seq)
        _check.check_count("tokens", tokens, least=0)
        table, length = self._tables[seq], self._lengths[seq]
        shared = bool(
            tokens and length % self.block_size and self.users[table[-1]] > 1
        )
        missing = -(-(length + tokens) // self.block_size) - len(table)
        if missing + shared > len(self._free):
            raise OutOfBlocks(
                f"want {missing + shared} blocks, {self.free_blocks} are free"
            )
        if shared:                                      # copy on write
            mine = self._take()
            for cache in (self.keys, self.values):
                cache[:, mine] = cache[:, table[-1]]
            self._release(table[-1])
            table[-1] = mine
        table += [self._take() for _ in range(missing)]
        self._lengths[seq] = length + tokens

    def write(self, seq: int, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Put k `(T, Hkv, D)` and v `(T, Hkv, Dv)` in the sequence's last T slots.

        They are rounded to the cache's dtype.
        """
        length = self.length(seq)
        self._check_tokens(k, v)
        if len(k) > length:
            raise ValueError(f"k: got {len(k)} tokens, want at most {length}")
        positions = torch.arange(length - len(k), length)
        table = torch.tensor(self._tables[seq], dtype=torch.int64)
        where = table[positions // self.block_size], positions % self.block_size
        self.keys[layer][where] = k.to(self.keys)
        self.values[layer][where] = v.to(self.values)

    def append(self, seq: int, k: Tensor, v: Tensor) -> None:
        """`extend` by k's tokens and `write` them, for a cache of one layer."""
        if len(self.keys) != 1:
            raise ValueError(
                f"append: got {len(self.keys)} layers, want 1; use extend and write"
            )
        self._check_tokens(k, v)
        self.extend(seq, len(k))
        self.write(seq, k, v)

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """Register the sequence's full blocks under the `tokens` they hold."""
        length = self.length(seq)
        if len(tokens) > length:
            raise ValueError(f"tokens: got {len(tokens)}, want at most {length}")
        known = zip(self._tables[seq], self._digests(tokens), strict=False)
        for block, digest in known:
            if digest not in self._block_of and block not in self._digest_of:
                self._block_of[digest], self._digest_of[block] = block, digest

    # --- what attention reads ------------------------------------------------

    def length(self, seq: int) -> int:
        """Tokens that the sequence has room for in its blocks."""
        self._known(seq)
        return self._lengths[seq]

    def table(self, seq: int) -> tuple[int, ...]:
        """The sequence's blocks, in order."""
        self._known(seq)
        return tuple(self._tables[seq])

    def batch(self, seqs: Sequence[int]) -> tuple[list[int], Tensor]:
        """`kv_lens` and `block_tables` of sequences, unused entries 0."""
        tables = [self.table(seq) for seq in seqs]
        out = torch.zeros(len(tables), max(map(len, tables), default=0), dtype=int)
        for row, table in zip(out, tables, strict=True):
            row[: len(table)] = torch.tensor(table, dtype=int)
        return [self.length(seq) for seq in seqs], out.to(self.keys.device)

    @property
    def free_blocks(self) -> int:
        """Blocks in no table."""
        return len(self._free)

    # --- blocks --------------------------------------------------------------

    def _take(self) -> int:
        """The block free for longest, without the prefix it was known by."""
        block = next(iter(self._free))
        self._block_of.pop(self._digest_of.pop(block, None), None)
        self._hold(block)
        return block

    def _hold(self, block: int) -> None:
        self._free.pop(block, None)
        self.users[block] += 1

    def _release(self, block: int) -> None:
        self.users[block] -= 1
        if self.users[block] == 0:
            self._free[block] = None

    def _digests(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """A digest a full block: of its tokens and all before them."""
        digest, size = b"", self.block_size
        for start in range(0, len(tokens) - size + 1, size):
            block = array("q", tokens[start : start + size]).tobytes()
            digest = hashlib.sha256(digest + block).digest()
            yield digest

    def _check_tokens(self, k: Tensor, v: Tensor) -> None:
        for name, x, cache in (("k", k, self.keys), ("v", v, self.values)):
            want = (len(k), *cache.shape[3:])
            if x.shape != want:
                raise ValueError(f"{name}: got {tuple(x.shape)}, want {want}")

    def _known(self, seq: int) -> None:
        if seq not in self._tables:
            raise ValueError(f"seq: got {seq!r}, want one of {sorted(self._tables)}")


def paged_bytes(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    itemsize: int = 2,
    block_size: int = 16,
    block_q: int = 256,
    block_k: int = 1024,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    index_size: int = 8,
) -> int:
    """Bytes that `paged_attention` moves.

    Queries and results once; keys and values in whole blocks of `block_size`,
    again for each tile of queries; `index_size` bytes for each block's number.
    """
    dims = head_dim + (head_dim if value_dim is None else value_dim)
    block_k = max(1, block_k // block_size) * block_size
    total = 0
    for queries, keys in zip(query_lens, kv_lens, strict=True):
        slots = -(-keys // block_size) * block_size
        tokens = keys_loaded(
            queries, slots, block_q=block_q, block_k=block_k, causal=causal,
            window=window, sinks=sinks, last=keys - 1,
        )
        total += itemsize * dims * (heads * queries + kv_heads * tokens)
        total += index_size * tokens // block_size
    return total
