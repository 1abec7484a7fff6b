"""The prefix tree: which full blocks of tokens are in the cache, found by content.

One node a full block; nodes are never split or moved, so a node is a stable place for a state checkpoint or a copy in
another tier. A node is found below its parent by its tokens. Its key, a chained hash of all tokens up to its end, is
its name elsewhere, equal on every machine; a prefix takes the keys of the nodes it meets and hashes only what is new.

A request locks the deepest node it stands on. That alone protects the whole path: only leaves are evicted, and the
ancestors of a locked node are no leaves. Leaves without a lock leave in the order of their last use.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence

Hash = Callable[[bytes], bytes]


def chain_hash(data: bytes) -> bytes:
    """128-bit BLAKE2b: fast, keyed by content only, the same in every process."""
    return hashlib.blake2b(data, digest_size=16).digest()


class Node:
    """One full block of tokens below its parent. `blocks` holds one block a paged group, 0 where there is none (a block
    that left its window and was evicted); `checkpoint` is the slot of the recurrent state after this block, or 0."""

    __slots__ = ("blocks", "checkpoint", "children", "depth", "key", "locks", "parent", "stamp", "tokens")

    def __init__(self, parent: Node | None, key: bytes, tokens: bytes, blocks: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.locks = 0
        self.checkpoint = 0
        self.stamp = 0


class Prefix:
    """A token sequence's full blocks, grown as the sequence grows: `chunks`, the tokens of each as bytes, and `keys`,
    those that were asked for so far, each computed once."""

    __slots__ = ("_hash", "block_size", "chunks", "keys", "salt")

    def __init__(self, block_size: int, salt: bytes, hash: Hash) -> None:
        self.block_size = block_size
        self.salt = salt
        self.keys: list[bytes] = []
        self.chunks: list[bytes] = []
        self._hash = hash

    def extend(self, tokens: Sequence[int], count: int) -> None:
        """Cover the first `count` blocks of `tokens`."""
        size, start = self.block_size, len(self.chunks)
        if count <= start:
            return
        width = size * 4
        data = array("i", tokens[start * size : count * size]).tobytes()
        self.chunks += [data[offset : offset + width] for offset in range(0, len(data), width)]

    def adopt(self, path: Sequence[Node]) -> None:
        """Take the keys of the nodes that hold the first blocks."""
        keys = self.keys
        keys += [node.key for node in path[len(keys) :]]

    def hashed(self, count: int) -> list[bytes]:
        """The keys of the first `count` blocks at least, which are covered."""
        keys, hash = self.keys, self._hash
        if len(keys) < count:
            key = keys[-1] if keys else hash(self.salt)
            for chunk in self.chunks[len(keys) : count]:
                key = hash(key + chunk)
                keys.append(key)
        return keys


class PrefixTree:
    """Nodes by content. Owns no blocks: the manager keeps the pools and frees what `evict` returns."""

    def __init__(self, block_size: int, hash: Hash = chain_hash) -> None:
        self.block_size = block_size
        self.num_nodes = 0
        self._hash = hash
        self._roots: dict[bytes, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []
        self._clock = 0
        self._serial = 0

    def prefix(self, salt: bytes = b"") -> Prefix:
        return Prefix(self.block_size, salt, self._hash)

    def root(self, salt: bytes) -> Node:
        """The root of the sequences with one salt: sequences with different salts never share a block."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, self._hash(salt), salt, [])
        return root

    def match(self, prefix: Prefix, limit: int) -> list[Node]:
        """The longest path of nodes that holds the first blocks of `prefix`, at most `limit` of them. Pure."""
        node = self._roots.get(prefix.salt)
        found: list[Node] = []
        if node is None:
            return found
        for chunk in prefix.chunks[:limit]:
            node = node.children.get(chunk)
            if node is None:
                break
            found.append(node)
        return found

    def child(self, node: Node, prefix: Prefix) -> Node | None:
        """The node below `node` for the next block of `prefix`."""
        return node.children.get(prefix.chunks[node.depth])

    def insert(self, node: Node, prefix: Prefix, blocks: list[int]) -> Node:
        """Add the next block of `prefix` below `node`. The place is empty (`child` returned None)."""
        depth, chunk = node.depth, prefix.chunks[node.depth]
        key = prefix.keys[depth] if depth < len(prefix.keys) else self._hash(node.key + chunk)
        child = Node(node, key, chunk, blocks)
        node.children[chunk] = child
        self.num_nodes += 1
        return child

    def lock(self, node: Node) -> None:
        node.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one lock; the path up to here counts as used now."""
        node.locks -= 1
        if node.locks < 0:
            raise ValueError("a node is unlocked more often than it was locked")
        self._clock += 1
        node.stamp = self._clock
        self._offer(node)

    def evict(self, count: int) -> list[Node]:
        """Take leaves without a lock out of the tree, least recently used first: `count`, or as many as there are. The
        caller frees what they hold."""
        evicted: list[Node] = []
        while self._leaves and len(evicted) < count:
            stamp, _, node = heapq.heappop(self._leaves)
            if node.stamp != stamp or not self._evictable(node):
                continue
            # The blocks of one prompt leave from its last on, without a turn in the queue for each.
            next_stamp = self._leaves[0][0] if self._leaves else stamp
            while len(evicted) < count and node.stamp <= next_stamp and self._evictable(node):
                evicted.append(node)
                node = self._cut(node)
            self._offer(node)
        return evicted

    def remove(self, node: Node) -> None:
        """Take a leaf without a lock out of the tree."""
        if not self._evictable(node):
            raise ValueError("only a leaf without a lock can leave the tree")
        self._offer(self._cut(node))

    def _cut(self, leaf: Node) -> Node:
        """The parent of a leaf that it has no longer."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens]
        leaf.parent = None
        self.num_nodes -= 1
        # A parent was in use whenever its child was.
        parent.stamp = max(parent.stamp, leaf.stamp)
        return parent

    def nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _evictable(self, node: Node) -> bool:
        return not node.locks and not node.children and node.parent is not None

    def _offer(self, node: Node) -> None:
        if node.parent is None and not node.locks and not node.children:
            self._roots.pop(node.tokens, None)
        if not self._evictable(node):
            return
        self._serial += 1
        heapq.heappush(self._leaves, (node.stamp, self._serial, node))
        if len(self._leaves) > 2 * self.num_nodes + 64:
            self._leaves = [e for e in self._leaves if e[2].stamp == e[0] and self._evictable(e[2])]
            heapq.heapify(self._leaves)

    def check_integrity(self) -> None:
        """Links, keys, depths and the eviction order's completeness. Raises AssertionError."""
        offered = {id(node) for stamp, _, node in self._leaves if node.stamp == stamp}
        count = 0
        for node in self.nodes():
            count += 1
            parent = node.parent
            assert parent is not None
            assert parent.children[node.tokens] is node, "a node and its parent disagree"
            assert node.depth == parent.depth + 1, "a node's depth is not its parent's plus one"
            assert node.key == self._hash(parent.key + node.tokens), "a node's key does not follow from its content"
            assert node.locks >= 0, "a node has a negative number of locks"
            assert not self._evictable(node) or id(node) in offered, "an evictable leaf can never be evicted"
        assert count == self.num_nodes, f"{count} nodes found, {self.num_nodes} counted"
