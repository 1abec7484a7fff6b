"""The KV manager: all that the scheduler sees of blocks, prefix tree and recurrent state.

Owns one block pool a paged group, the prefix tree, the state slots, and the writes and copies that the next plan
carries. The life of a request's table:

    match (changes nothing) → admit (all or nothing) → extend, truncate, commit, … → release

Steps run in the order in which they are launched. So a block that is released while a step still reads or writes it
may be handed out at once: whoever gets it writes to it in a later step. The same holds for state slots.

A prefix hit of k blocks needs, for a group that keeps everything, the k blocks; for a group with a window, the blocks
of the last window - 1 tokens; for recurrent groups, a state checkpoint on the k-th node. At least one token is always
left to compute, because its logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.cache.blocks import BlockPool, KVTable
from engine.cache.checkpoints import StateSlots
from engine.cache.radix import Hash, Node, PrefixTree, chain_hash
from engine.cache.spec import PoolSpec, Recurrent, window_of
from engine.cache.writes import BlockWrite, StateCopy


@dataclass(frozen=True, slots=True)
class Match:
    """A usable prefix: the nodes of its blocks, and how many tokens they hold."""

    path: list[Node]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GroupUse:
    """Blocks of one paged group: held by requests, kept only for prefix hits, all."""

    used: int
    cached: int
    total: int


NO_MATCH = Match([], 0)


class KVManager:
    """Accounts for the pools of one runner. Not thread-safe: the loop owns it."""

    def __init__(
        self, spec: PoolSpec, *, prefix_cache: bool = True, max_length: int | None = None, hash: Hash = chain_hash
    ) -> None:
        """`max_length`: no request holds more tokens. Raises ValueError for pools in which one could get stuck."""
        self.block_size = spec.block_size
        self.prefix_cache = prefix_cache
        self.writes: list[BlockWrite] = []
        self.copies: list[StateCopy] = []
        paged = [i for i, group in enumerate(spec.groups) if not isinstance(group.spec, Recurrent)]
        self._groups = paged
        self._windows = [window_of(spec.groups[i].spec) for i in paged]
        self._windowed = [g for g, window in enumerate(self._windows) if window is not None]
        self._full = [g for g, window in enumerate(self._windows) if window is None]
        self._pools = [BlockPool(spec.num_blocks[i]) for i in paged]
        self.recurrent = len(paged) < len(spec.groups)
        self._slots = StateSlots(spec.num_state_slots if self.recurrent else 0)
        if self.recurrent and not self._slots.capacity:
            raise ValueError("the model keeps recurrent state, but the pool has no state slots")
        self._tree = PrefixTree(spec.block_size, hash)
        self._owners: list[dict[int, Node]] = [{} for _ in paged]
        self._computing: dict[bytes, KVTable] = {}  # by the keys of blocks that were announced
        self._unannounced: dict[int, KVTable] = {}  # those whose keys nobody has needed yet
        self._tables: dict[int, KVTable] = {}
        self._generation = 0  # of prefixes: tables of different ones share nothing
        self.num_releases = 0  # grows whenever room may have been made
        for g in self._windowed:
            window, held = self._windows[g] or 0, self._pools[g].capacity
            # One block more than the window covers, since a window seldom begins with a block, and one to write in.
            least = -(-window // self.block_size) + 2
            if max_length is not None:
                least = min(least, -(-max_length // self.block_size))
            if held < least:
                raise ValueError(
                    f"a sliding window of {window} tokens needs at least {least} blocks of {self.block_size} tokens, "
                    f"and the pool holds {held}: raise num_blocks"
                )

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens that one request alone can hold; None when no group keeps every token."""
        blocks = [self._pools[g].capacity for g in self._full]
        return min(blocks) * self.block_size if blocks else None

    @property
    def keeps_state(self) -> bool:
        """True when a prefix hit needs a state checkpoint, so that steps should end where one can be taken."""
        return self.recurrent and self.prefix_cache

    def use(self) -> tuple[GroupUse, ...]:
        return tuple(GroupUse(p.num_used, p.num_idle, p.capacity) for p in self._pools)

    def slot_use(self) -> GroupUse:
        slots = self._slots
        return GroupUse(slots.capacity - slots.num_free - slots.num_checkpoints, slots.num_checkpoints, slots.capacity)

    def new_table(self, salt: bytes = b"") -> KVTable:
        """An empty table. Requests with different salts never share blocks. Safe to call from any thread."""
        generation = self._generation
        salt = b"%d:" % generation + salt if generation or salt else b""
        return KVTable(self._tree.prefix(salt), len(self._pools))

    def forget_prefixes(self) -> None:
        """Tables that are made from now on meet nothing of what was computed for those before. What no request holds is
        free at once, the rest when it is evicted."""
        self._generation += 1
        self._discard(self._tree.evict(self._tree.num_nodes))
        self.num_releases += 1

    # Admission

    def match(self, table: KVTable, tokens: Sequence[int]) -> Match:
        """The longest usable prefix of `tokens` in the tree, one token short of all of them at most. Holds nothing."""
        if not self.prefix_cache:
            return NO_MATCH
        limit = (len(tokens) - 1) // self.block_size
        table.prefix.extend(tokens, len(tokens) // self.block_size)
        path = self._tree.match(table.prefix, limit)
        table.prefix.adopt(path)
        count = len(path)
        if self._windowed or self.recurrent:
            count = self._usable(path)
            del path[count:]
        return Match(path, count * self.block_size) if count else NO_MATCH

    def _usable(self, path: list[Node]) -> int:
        best = 0
        runs = [0] * len(self._pools)
        for count, node in enumerate(path, 1):
            good = bool(node.checkpoint) or not self.recurrent
            for g in self._windowed:
                runs[g] = runs[g] + 1 if node.blocks[g] else 0
                good = good and runs[g] >= count - self._first_kept(g, count * self.block_size)
            if good:
                best = count
        return best

    def _first_kept(self, g: int, position: int) -> int:
        """First block that a token at `position` or later can read in group `g`."""
        window = self._windows[g]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def awaited(self, table: KVTable, tokens: Sequence[int], match: Match) -> tuple[int, bytes]:
        """How many tokens beyond `match` a running request is computing now, so that they will soon be a prefix hit,
        and the key of their last block (b"" when there are none)."""
        self._announce()
        if not self._computing:
            return 0, b""
        depth = start = len(match.path)
        limit = (len(tokens) - 1) // self.block_size
        keys = table.prefix.keys
        other: KVTable | None = None
        while depth < limit and (found := self._computing.get(table.prefix.hashed(depth + 1)[depth])) is not None:
            other = found
            depth += 1
        if other is not None and self.recurrent:
            # State is kept for sure only where the other's known tokens end.
            depth = other.announced if other.announced <= depth else start
        return ((depth - start) * self.block_size, keys[depth - 1]) if depth > start else (0, b"")

    def is_computing(self, key: bytes) -> bool:
        return key in self._computing

    def admit(self, table: KVTable, row: int, tokens: Sequence[int], match: Match, upto: int, headroom: int) -> int:
        """Hold the matched prefix, blocks for all of `tokens` (for positions below `upto` where there is a window) and
        a state slot. Returns the covered tokens (at most `upto`), or match.num_tokens with nothing held when that does
        not fit or would leave less than `headroom` blocks in a group that keeps everything."""
        first = match.num_tokens
        depth = len(match.path)
        table.row = row
        self._tables[id(table)] = table
        node = match.path[-1] if depth else self._tree.root(table.prefix.salt)
        table.node = node
        self._tree.lock(node)
        for g, pool in enumerate(self._pools):
            low = table.start[g] = min(self._first_kept(g, first), depth)
            held = [node.blocks[g] for node in match.path[low:]]
            pool.share(held)
            table.blocks[g] = [0] * low + held
            if held:
                self.writes.append(BlockWrite(self._groups[g], row, low, held))
        fits = self._take_slot(table, match)
        if fits:
            total = -(-len(tokens) // self.block_size)
            for g in self._full:
                pool = self._pools[g]
                fits = (
                    fits and pool.num_free + pool.num_idle >= total - depth + headroom and self._grow(table, g, total)
                )
        covered_tokens = self.extend(table, first, upto) if fits else first
        if covered_tokens <= first:
            self.release(table)
            return first
        if self.recurrent and depth:
            self.copies.append(StateCopy(match.path[-1].checkpoint, table.state_slot))
        if self.prefix_cache:
            table.announced = (len(tokens) - self.recurrent) // self.block_size
            if table.announced > depth:
                self._unannounced[id(table)] = table
        return covered_tokens

    def _take_slot(self, table: KVTable, match: Match) -> bool:
        if not self.recurrent:
            return True
        if match.path:
            self._slots.pin(match.path[-1].checkpoint)
        table.state_slot = self._slots.take()
        self._slots.unpin()
        return table.state_slot > 0

    def _announce(self) -> None:
        """Say what running requests compute. Put off until another request asks: hashing a long prompt takes longer
        than all else of its admission."""
        for table in self._unannounced.values():
            assert table.node is not None
            for key in table.prefix.hashed(table.announced)[table.node.depth : table.announced]:
                self._computing.setdefault(key, table)
        self._unannounced.clear()

    # Growth

    def extend(self, table: KVTable, first: int, upto: int) -> int:
        """Make every group cover positions [first, upto), evicting what only the tree holds. Returns how far it got:
        `upto`, or less, or `first` when not even the next position fits."""
        count = -(-upto // self.block_size)
        for g, blocks in enumerate(table.blocks):
            if len(blocks) < count and not self._grow(table, g, count):
                if self._windows[g] is not None:
                    self._trim(table, g, first)
                self._grow(table, g, len(blocks) + self._room(g, count - len(blocks)))
        table.covered_tokens = min(map(len, table.blocks), default=count) * self.block_size
        return max(first, min(upto, table.covered_tokens))

    def _grow(self, table: KVTable, g: int, count: int) -> bool:
        """Give group `g`'s table `count` entries, or change nothing and return False."""
        blocks = table.blocks[g]
        missing = count - len(blocks)
        if missing <= 0:
            return True
        if self._room(g, missing) < missing:
            return False
        taken = self._pools[g].take(missing)
        self.writes.append(BlockWrite(self._groups[g], table.row, len(blocks), taken))
        blocks += taken
        return True

    def _room(self, g: int, wanted: int) -> int:
        """Free blocks of group `g`, at most `wanted`, after evicting as many idle ones as it takes."""
        pool = self._pools[g]
        while pool.num_free < wanted:
            if self._windows[g] is not None:
                if not pool.idle:
                    break
                self._forget(g, next(iter(pool.idle)))
            else:
                evicted = self._tree.evict(wanted - pool.num_free)
                if not evicted:
                    break
                self._discard(evicted)
        return min(pool.num_free, wanted)

    def _forget(self, g: int, block: int) -> None:
        """Evict one idle block of a windowed group from its node, and the node too if nothing is left on it."""
        node = self._owners[g].pop(block)
        node.blocks[g] = 0
        self._pools[g].evict([block])
        self._prune(node)

    def _prune(self, node: Node | None) -> None:
        """Take a leaf that holds no block out of the tree, then its ancestors as long as the same is true of them."""
        while node is not None and node.parent is not None and not (node.children or node.locks or any(node.blocks)):
            parent = node.parent
            self._tree.remove(node)
            self._slots.retract(node)
            node = parent

    def _discard(self, nodes: Sequence[Node]) -> None:
        """Free what nodes hold that have left the tree."""
        for g, owners in enumerate(self._owners):
            blocks = [node.blocks[g] for node in nodes if node.blocks[g]]
            for block in blocks:
                del owners[block]
            self._pools[g].evict(blocks)
        if self.recurrent:
            for node in nodes:
                self._slots.retract(node)

    def _trim(self, table: KVTable, g: int, first: int) -> None:
        """Let go of the blocks that no token at `first` or later reads."""
        blocks, start = table.blocks[g], table.start[g]
        low = min(self._first_kept(g, first), len(blocks))
        self.num_releases += low > start
        if low > start:
            self._pools[g].drop(blocks[start:low])
            blocks[start:low] = [0] * (low - start)
            table.start[g] = low

    def truncate(self, table: KVTable, length: int) -> int:
        """Take back the positions from `length` on: blocks that hold none before it are let go, and the state
        checkpoints behind it. Returns how many blocks were. A step in flight may still write there, as `release` says.

        The row's own recurrent state is not the manager's to take back: the runner keeps, in the row's slot, the state
        at which a drafted step began and that step's inputs, so that a copy of the slot is whole as well.

        Raises ValueError when `length` lies in what was committed, which the tree may have given to others, or when a
        token there reads what already left its window.
        """
        node = table.node
        if node is None or length < node.depth * self.block_size:
            raise ValueError(
                f"positions from {length} on cannot be taken back: "
                + ("the request holds nothing" if node is None else f"{node.depth} full blocks are committed")
            )
        if any(self._first_kept(g, length) < table.start[g] for g in self._windowed):
            raise ValueError(f"positions from {length} on cannot be taken back: what a token there reads was let go")
        keep, count = -(-length // self.block_size), 0
        for g, blocks in enumerate(table.blocks):
            dropped = [block for block in blocks[keep:] if block]
            if dropped:
                self._pools[g].drop(dropped)
                count += len(dropped)
            del blocks[keep:]
        table.covered_tokens = min(map(len, table.blocks), default=keep) * self.block_size
        if count and self.writes:
            # Entries that are written in this plan and taken again in it are written once.
            self.writes = [kept for write in self.writes if (kept := _below(write, table.row, keep)) is not None]
        while table.pending and table.pending[-1][0] * self.block_size > length:
            self._slots.release(table.pending.pop()[1])
        self.num_releases += count > 0
        return count

    # After a step

    def commit(self, table: KVTable, tokens: Sequence[int], upto: int) -> None:
        """Positions below `upto` are computed and their tokens known: full blocks enter the tree. Then blocks that left
        the window of a token at `upto` are let go: those stay in the tree as long as there is room. The position that
        is launched next may be further; blocks between the two are in no tree yet, and would be lost to later hits."""
        if self.prefix_cache:
            self._insert(table, tokens, upto // self.block_size)
        for g in self._windowed:
            self._trim(table, g, upto)

    def _insert(self, table: KVTable, tokens: Sequence[int], count: int) -> None:
        """Make nodes of the table's first `count` blocks, publish states that wait for them, and move its lock on."""
        old = table.node
        if old is None or old.depth >= count:
            return
        node = old
        prefix = table.prefix
        prefix.extend(tokens, count)
        while node.depth < count:
            depth = node.depth
            child = self._tree.child(node, prefix)
            if child is None:
                child = self._tree.insert(node, prefix, [0] * len(self._pools))
            for g, held in enumerate(child.blocks):
                # A request that computed the same block at the same time keeps its own copy until it ends.
                if not held and (block := table.blocks[g][depth]):
                    child.blocks[g] = block
                    self._pools[g].keep(block)
                    self._owners[g][block] = child
            if self._computing.get(child.key) is table:
                del self._computing[child.key]
            node = child
            while table.pending and table.pending[0][0] <= node.depth:
                self._slots.publish(node, table.pending.pop(0)[1])
        if node.depth >= table.announced:
            self._unannounced.pop(id(table), None)
        if node is not old:
            self._tree.lock(node)
            self._tree.unlock(old)
            table.node = node

    def save_state(self, table: KVTable, position: int) -> None:
        """The row's state stands at `position`: if a block ends there and a slot can be had, copy it to a checkpoint.
        The copy goes with the next plan, before the row moves on. The checkpoint is published as soon as the block is
        in the tree, which may be now: copies run in order, so a row that starts from it in the same plan finds it."""
        node = table.node
        if not self.keeps_state or not position or position % self.block_size or node is None:
            return
        depth = position // self.block_size
        if (depth == node.depth and node.checkpoint) or (table.pending and table.pending[-1][0] >= depth):
            return
        slot = self._slots.reserve()
        if not slot:
            return
        self.copies.append(StateCopy(table.state_slot, slot))
        if depth == node.depth:
            self._slots.publish(node, slot)
        else:
            table.pending.append((depth, slot))

    def release(self, table: KVTable) -> None:
        """Let go of everything. Full blocks that were committed stay in the tree until there is no room."""
        if self._tables.pop(id(table), None) is None:
            return
        self.num_releases += 1
        if self.writes:
            # The row may be given away before these are sent; a plan writes an entry once. Copies stay: they run in
            # order, and a later one may read what an earlier one wrote.
            self.writes = [write for write in self.writes if write.row != table.row]
        self._withdraw(table)
        for g, pool in enumerate(self._pools):
            pool.drop(table.blocks[g][table.start[g] :])
            table.blocks[g] = []
            table.start[g] = 0
        if table.node is not None:
            self._tree.unlock(table.node)
            self._prune(table.node)
        for _, slot in table.pending:
            self._slots.release(slot)
        if table.state_slot:
            self._slots.release(table.state_slot)
        table.node, table.state_slot, table.covered_tokens, table.row = None, 0, 0, -1
        table.pending.clear()

    def _withdraw(self, table: KVTable) -> None:
        self._unannounced.pop(id(table), None)
        for key in table.prefix.keys[: table.announced]:
            if self._computing.get(key) is table:
                del self._computing[key]
        table.announced = 0

    def check_integrity(self) -> None:
        """Account for every block, node and slot. Raises AssertionError with a sentence."""
        self._tree.check_integrity()
        nodes = list(self._tree.nodes())
        tables = list(self._tables.values())
        for g, pool in enumerate(self._pools):
            users: dict[int, int] = {}
            for table in tables:
                for block in table.blocks[g]:
                    if block:
                        users[block] = users.get(block, 0) + 1
            owners = {node.blocks[g]: node for node in nodes if node.blocks[g]}
            assert owners == self._owners[g], "blocks and the nodes that hold them disagree"
            pool.check_integrity(users, set(owners))
        for node in nodes:
            assert node.locks == sum(t.node is node for t in tables), "a node's locks are not those of the requests"
            assert all(node.blocks[g] for g in self._full), "a node lost a block of a group that keeps everything"
        held = [t.state_slot for t in tables if t.state_slot] + [slot for t in tables for _, slot in t.pending]
        self._slots.check_integrity(held, nodes)
        for key, table in self._computing.items():
            assert id(table) in self._tables, "a finished request still announces blocks"
            assert key in table.prefix.keys[: table.announced], "a request announces a block that is not its own"
        for table in self._unannounced.values():
            assert id(table) in self._tables, "a finished request still has blocks to announce"
            assert table.node is not None
            assert table.node.depth < table.announced, "a request has blocks to announce that it has computed"


def _below(write: BlockWrite, row: int, keep: int) -> BlockWrite | None:
    """What is left of a write when row `row` keeps the first `keep` entries of its tables; None when nothing is."""
    if write.row != row or write.index + len(write.blocks) <= keep:
        return write
    if write.index >= keep:
        return None
    return BlockWrite(write.group, row, write.index, write.blocks[: keep - write.index])
