"""The prefix tree: found by content, safe from collisions, evicted from the leaves, oldest use first."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.radix import Node, Prefix, PrefixTree, chain_hash


def insert(tree: PrefixTree, tokens: list[int], salt: bytes = b"") -> Node:
    """Put all full blocks of `tokens` in the tree, used now; the deepest node."""
    prefix = prefix_of(tree, tokens, salt)
    node = tree.root(salt)
    for _ in prefix.chunks:
        node = tree.child(node, prefix) or tree.insert(node, prefix, [1])
    touch(tree, node)
    return node


def touch(tree: PrefixTree, node: Node) -> None:
    tree.lock(node)
    tree.unlock(node)


def prefix_of(tree: PrefixTree, tokens: list[int], salt: bytes = b"") -> Prefix:
    prefix = tree.prefix(salt)
    prefix.extend(tokens, len(tokens) // tree.block_size)
    return prefix


def matched(tree: PrefixTree, tokens: list[int], salt: bytes = b"", limit: int = 100) -> int:
    return len(tree.match(prefix_of(tree, tokens, salt), limit))


def test_finds_the_longest_prefix_in_whole_blocks() -> None:
    tree = PrefixTree(2)
    insert(tree, [1, 2, 3, 4, 5, 6, 7])
    assert matched(tree, [1, 2, 3, 4, 5, 6, 7, 8]) == 3
    assert matched(tree, [1, 2, 3, 4, 9, 9]) == 2
    assert matched(tree, [1, 2, 3]) == 1
    assert matched(tree, [2, 1]) == 0
    assert matched(tree, [1, 2, 3, 4], limit=1) == 1


def test_the_same_block_after_another_beginning_is_another_node() -> None:
    tree = PrefixTree(2)
    insert(tree, [1, 2, 3, 4])
    insert(tree, [9, 9, 3, 4])
    assert tree.num_nodes == 4


def test_salts_part_the_tree() -> None:
    tree = PrefixTree(2)
    insert(tree, [1, 2], b"a")
    assert matched(tree, [1, 2], b"a") == 1
    assert matched(tree, [1, 2], b"b") == 0
    assert matched(tree, [1, 2]) == 0
    assert len(tree.evict(1)) == 1
    assert not tree._roots, "a root without children is kept for nobody"


def test_contents_with_one_key_never_meet() -> None:
    """With a hash that always collides nodes are still found by their tokens."""
    tree = PrefixTree(2, hash=lambda data: b"same")
    insert(tree, [1, 2])
    assert matched(tree, [1, 2]) == 1
    assert matched(tree, [3, 4]) == 0
    insert(tree, [3, 4])
    assert tree.num_nodes == 2
    assert matched(tree, [3, 4]) == 1
    assert tree.child(tree.root(b""), prefix_of(tree, [5, 6])) is None
    tree.check_integrity()


def test_keys_depend_on_content_alone() -> None:
    """Another process, with other hash randomisation, gives the same keys: so tiers and replicas can compare them."""
    code = (
        "from engine.cache.radix import PrefixTree\n"
        "prefix = PrefixTree(2).prefix(b's'); prefix.extend([1, 2, 3, 4], 2); print(prefix.hashed(2))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == repr(prefix_of(PrefixTree(2), [1, 2, 3, 4], b"s").hashed(2))


def test_keys_grow_with_the_tokens() -> None:
    tree = PrefixTree(3)
    tokens = list(range(20))
    grown = tree.prefix()
    for count in range(7):
        grown.extend(tokens, count)
        grown.hashed(count)
    assert grown.keys == prefix_of(tree, tokens).hashed(6)
    assert len(set(grown.keys)) == 6
    assert all(len(key) == len(chain_hash(b"")) == 16 for key in grown.keys)


@pytest.mark.parametrize("asked", [0, 1, 4])
def test_a_prefix_takes_the_keys_of_the_nodes_it_meets(asked: int) -> None:
    """However many it had computed before, its keys are those of its content, and only what is new is hashed."""
    count = 0

    def counting(data: bytes) -> bytes:
        nonlocal count
        count += 1
        return chain_hash(data)

    tree = PrefixTree(2, hash=counting)
    insert(tree, [1, 2, 3, 4, 5, 6])
    prefix = prefix_of(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    prefix.hashed(asked)
    count = 0
    prefix.adopt(tree.match(prefix, 4))
    assert prefix.hashed(4) == prefix_of(PrefixTree(2), [1, 2, 3, 4, 5, 6, 7, 8]).hashed(4)
    assert count == (0 if asked == 4 else 1)


def test_leaves_go_first_and_the_least_recently_used_of_them() -> None:
    tree = PrefixTree(1)
    for tokens in ([1, 2, 3], [1, 2, 4], [5]):
        insert(tree, tokens)
    touch(tree, tree.match(prefix_of(tree, [1, 2, 3]), 3)[-1])
    order = []
    while evicted := tree.evict(1):
        order += [int.from_bytes(node.tokens, sys.byteorder) for node in evicted]
        tree.check_integrity()
    assert order == [4, 5, 3, 2, 1]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12), st.integers(1, 9))
def test_leaves_that_go_together_go_in_the_order_of_those_that_go_alone(prompts: list[list[int]], count: int) -> None:
    orders = []
    for together in (1, count):
        tree = PrefixTree(1)
        for tokens in prompts:
            insert(tree, tokens)
        order: list[tuple[int, bytes]] = []
        while evicted := tree.evict(together):
            assert len(evicted) == together or not tree.num_nodes
            order += [(node.depth, node.key) for node in evicted]
            tree.check_integrity()
        orders.append(order)
    assert orders[0] == orders[1]
    assert len(orders[0]) == len({key for _, key in orders[0]})


def test_a_lock_protects_the_path_and_nothing_else() -> None:
    tree = PrefixTree(1)
    insert(tree, [1, 2, 3])
    node = tree.match(prefix_of(tree, [1, 2]), 2)[-1]
    tree.lock(node)
    assert [n.depth for n in tree.evict(9)] == [3]
    assert matched(tree, [1, 2, 3]) == 2
    tree.unlock(node)
    assert [n.depth for n in tree.evict(9)] == [2, 1]
    with pytest.raises(ValueError, match="more often than it was locked"):
        tree.unlock(node)


def test_the_queue_of_leaves_does_not_grow_with_use() -> None:
    tree = PrefixTree(1)
    nodes = [insert(tree, [i]) for i in range(10)]
    for _ in range(100):
        for node in nodes:
            touch(tree, node)
    assert len(tree._leaves) <= 2 * 10 + 65
    tree.check_integrity()
    assert tree.evict(10) == nodes
