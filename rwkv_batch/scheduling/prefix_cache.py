"""Which prompts begin alike: states at the ends of shared prefixes, and who computes one that several rows need.

Prompts are cut into blocks of BLOCK tokens, and the blocks of all prompts seen form a tree; a node may hold the state after the
tokens on the way to it. A row starts from the deepest state on its way. A row whose way coincides with that of one being fed
waits for it: so a prefix is computed once, however many rows of however many requests begin with it. It waits for a row of
another request only if that is fed no later than it would be itself, so that nobody waits in another's queue; if it does not
wait, it looks once more when its own turn comes. Where a state is worth
its memory is seen from the tree (Pan et al., "Marconi: prefix caching for the era of hybrid LLMs", 2024): where two prompts
part, for that prefix has come twice; at the end of a long prompt, which the next turn of a chat begins with; and every
`every_tokens` where a long prompt is cut anyhow.

States lie at multiples of BLOCK, where the matrix form of prefill cuts a row in any case, and at least TAIL tokens before a
prompt's end; so a row that starts from one computes the same numbers as one that is fed whole. Exact: a node is found by its
tokens themselves. Plain Python: a state is anything with `num_bytes`.
"""

from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rwkv_batch.request import Sequence
from rwkv_batch.scheduling.plan import PREFILL_CHUNK

BLOCK = PREFILL_CHUNK  # tokens
TAIL = 16  # tokens fed after the last state: products over fewer rows are summed in another order
MAX_NODES = 65_536  # two million tokens of prompts seen
MAX_WAITS = 2  # of a row for rows of other requests, which may be cancelled before they are there


class Snapshot(Protocol):
    """A state."""

    num_bytes: int


class Node:
    """The end of a prefix of `depth` blocks.

    rows     of each request, the first row that will feed up to here, also when it has
    waiting  rows that will start from here as soon as one of them has
    """

    __slots__ = ("block", "children", "depth", "parent", "rows", "snapshot", "waiting")

    def __init__(self, parent: "Node | None", block: bytes, depth: int):
        self.parent = parent
        self.block = block
        self.depth = depth
        self.children: dict[bytes, Node] = {}
        self.snapshot: Snapshot | None = None
        self.rows: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []

    @property
    def num_tokens(self) -> int:
        """Length of the prefix."""
        return self.depth * BLOCK


@dataclass(eq=False, slots=True)
class Way:
    """A started row's way through the tree, as far as states may lie on it.

    kept      tokens behind the last state on it
    waits_at  the node it waits at
    leader    the row that it waits for there
    """

    nodes: list[Node] = field(default_factory=list)
    kept: int = 0
    waits_at: Node | None = None
    leader: Sequence | None = None


class PrefixCache:
    """States of prefixes, `max_bytes` of them.

    min_tokens    shortest prefix worth sharing
    every_tokens  distance of states inside a prompt; also the shortest rest of a prompt whose end is kept
    """

    def __init__(self, max_bytes: int, *, min_tokens: int = 128, every_tokens: int = 512):
        self.max_bytes = max_bytes
        self.min_tokens = max(BLOCK, min_tokens)
        self.every_tokens = max(BLOCK, every_tokens)
        self.num_bytes = 0
        self._roots: dict[str, Node] = {}  # namespace, and what rows begin with -> the empty prefix
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # a parent is always newer than its children
        self._states: OrderedDict[Node, None] = OrderedDict()  # nodes with one, the longest unused first
        self._ways: dict[Sequence, Way] = {}
        self._totals = {
            "prefix_queries_total": 0,
            "prefix_hits_total": 0,
            "prefix_queried_tokens_total": 0,
            "prefix_cached_tokens_total": 0,
        }

    def stats(self) -> dict[str, int]:
        """Figures of this moment."""
        return {"prefix_states": len(self._states), "prefix_bytes": self.num_bytes, **self._totals}

    def start(self, sequence: Sequence, is_next: Callable[[Sequence], bool]) -> bool:
        """A row has its slot: choose the state it starts from. False: it waits, and `fed` or `end` will return it.

        is_next  whether the next turn of a row's request is this row's
        """
        request = sequence.request
        limit = (len(sequence.prompt) - TAIL) // BLOCK
        if sequence.continues or sequence.recalled:
            return True  # it goes on from a state of its own
        if not request.cache or request.prompt_logprobs is not None:
            return True
        if limit * BLOCK < self.min_tokens:
            return True
        self._count_query(sequence, 1)
        way = self._ways[sequence] = Way()
        known = self._follow(way, sequence, limit)
        hit = next((node for node in reversed(way.nodes[:known]) if node.snapshot is not None), None)
        for node in reversed(way.nodes[hit.depth if hit else 0 : known]):
            if node.num_tokens < self.min_tokens:
                break
            leader = _leader(node, sequence, hit.num_tokens if hit else 0, is_next)
            if leader is not None:
                self._wait(way, sequence, node, leader)
                _claim(way, sequence, node.depth)
                return False
        if hit is not None:
            self._states.move_to_end(hit)
            self._begin_at(sequence, way, hit, hit.snapshot)
        if known * BLOCK - way.kept >= self.min_tokens:
            sequence.cuts.append(known * BLOCK)
        self._plan_end(sequence, way)
        _claim(way, sequence, hit.depth if hit else 0)
        return True

    def begin(self, sequence: Sequence, is_next: Callable[[Sequence], bool]) -> bool:
        """A row's turn has come: choose once more, as far as its followers allow. Returns the same as `start`."""
        way = self._ways.get(sequence)
        if way is None or sequence.finalizing:
            return True
        followers = (other for node in way.nodes for other in node.waiting if self._ways[other].leader is sequence)
        may_wait = all(follower.request is sequence.request for follower in followers)
        for node in reversed(way.nodes[sequence.cached // BLOCK :]):
            if node.num_tokens < self.min_tokens:
                break
            if any(cut < node.num_tokens for cut in sequence.cuts):
                continue  # the state there is wanted, or waited for
            if node.snapshot is not None:
                self._states.move_to_end(node)
                self._begin_at(sequence, way, node, node.snapshot)
                self._plan_end(sequence, way)
                return True
            leader = _other_leader(node, sequence, sequence.cached, is_next) if may_wait else None
            if leader is not None:
                self._wait(way, sequence, node, leader)
                return False
        return True

    def waits(self, sequence: Sequence) -> bool:
        """Whether a started row waits for another one's state."""
        way = self._ways.get(sequence)
        return way is not None and way.waits_at is not None

    def fed(self, sequence: Sequence, take: Callable[[], Snapshot | None]) -> list[Sequence]:
        """A row was fed up to `num_prefilled`: keep its state, which `take` copies, if it is worth it and `take` finds memory.

        Returns rows that waited for it and go on from there, or without it from their first token.
        """
        way = self._ways.get(sequence)
        depth, rest = divmod(sequence.num_prefilled, BLOCK)
        is_cut = bool(sequence.cuts) and sequence.cuts[0] == sequence.num_prefilled
        if is_cut:
            sequence.cuts.pop(0)
        if way is None or rest or not 0 < depth <= len(way.nodes):
            return []
        if not is_cut and sequence.num_prefilled - way.kept < self.every_tokens:
            return []
        node = way.nodes[depth - 1]
        snapshot = node.snapshot or take()
        way.kept = sequence.num_prefilled
        if snapshot is not None:
            self._store(node, snapshot)
        followers, node.waiting = node.waiting, []
        for follower in followers:
            way = self._ways[follower]
            way.waits_at = way.leader = None
            if snapshot is not None:
                self._begin_at(follower, way, node, snapshot)
            self._plan_end(follower, way)
        return followers

    def end(self, sequence: Sequence, *, nonfinite: bool = False) -> list[Sequence]:
        """A started row has ended; return rows that waited for it and are to start anew, in order.

        nonfinite  its numbers were not finite: no row shall start from what it started from or left
        """
        way = self._ways.get(sequence)
        if way is None:
            return []
        if way.waits_at is not None:
            way.waits_at.waiting.remove(sequence)
        if nonfinite:
            for node in way.nodes:
                self._drop_state(node)
        thrown_back = [sequence]  # who waits for a row that waited is thrown back with it
        for row in thrown_back:
            row.cuts.clear()
            for node in self._ways.pop(row).nodes:
                if node.rows.get(row.request.id) is row:
                    del node.rows[row.request.id]
                    followers = [other for other in node.waiting if self._ways[other].leader is row]
                    if followers:
                        thrown_back += followers
                        node.waiting = [other for other in node.waiting if other not in followers]
        followers = thrown_back[1:]
        for follower in followers:
            self._count_query(follower, -1)  # it will ask again
        return followers

    def _count_query(self, sequence: Sequence, times: int) -> None:
        self._totals["prefix_queries_total"] += times
        self._totals["prefix_queried_tokens_total"] += times * len(sequence.prompt)

    def _follow(self, way: Way, sequence: Sequence, limit: int) -> int:
        """Fill in the row's way of `limit` nodes, making those that are missing; return how many were there."""
        request = sequence.request
        origin = f"{request.namespace}\0{request.state}"
        node = self._roots.get(origin)
        if node is None:
            node = self._roots[origin] = Node(None, origin.encode(), 0)
        tokens = array("I", sequence.prompt[: limit * BLOCK]).tobytes()
        known, size = 0, len(tokens) // limit
        for depth in range(1, limit + 1):
            block = tokens[(depth - 1) * size : depth * size]
            child = node.children.get(block)
            if child is None:
                child = node.children[block] = Node(node, block, depth)
                self._nodes[child] = None
            else:
                known = depth
            way.nodes.append(child)
            node = child
        for node in reversed(way.nodes):  # parents last: the oldest node is always a leaf
            self._nodes.move_to_end(node)
        while len(self._nodes) > MAX_NODES:
            self._forget_oldest()
        return known

    def _wait(self, way: Way, sequence: Sequence, node: Node, leader: Sequence) -> None:
        """Let a row wait until another one has been fed up to a node."""
        if node.num_tokens not in leader.cuts:
            insort(leader.cuts, node.num_tokens)
        node.waiting.append(sequence)
        way.waits_at, way.leader = node, leader
        sequence.num_waits += leader.request is not sequence.request

    def _begin_at(self, sequence: Sequence, way: Way, node: Node, snapshot: Snapshot) -> None:
        """Let a row start from a state instead of from the first token, or from one further on."""
        self._totals["prefix_hits_total"] += not sequence.cached
        self._totals["prefix_cached_tokens_total"] += node.num_tokens - sequence.cached
        sequence.initial = snapshot
        sequence.num_prefilled = sequence.cached = way.kept = node.num_tokens
        sequence.cuts = [cut for cut in sequence.cuts if cut > node.num_tokens]

    def _plan_end(self, sequence: Sequence, way: Way) -> None:
        """Have the row stop for a state at its end, if the end is far from the last one."""
        end = len(way.nodes) * BLOCK
        if end - max([way.kept, *sequence.cuts]) >= self.every_tokens:
            sequence.cuts.append(end)

    def _store(self, node: Node, snapshot: Snapshot) -> None:
        if node.snapshot is None:
            node.snapshot = snapshot
            self.num_bytes += snapshot.num_bytes
        self._states[node] = None
        self._states.move_to_end(node)
        while self.num_bytes > self.max_bytes:
            self._drop_state(next(iter(self._states)))

    def _drop_state(self, node: Node) -> None:
        if node.snapshot is not None:
            self.num_bytes -= node.snapshot.num_bytes
            node.snapshot = None
            del self._states[node]

    def _forget_oldest(self) -> None:
        """Take the leaf out that was not passed for longest."""
        node, _ = self._nodes.popitem(last=False)
        self._drop_state(node)
        del node.parent.children[node.block]
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.parent.block.decode()]


def _claim(way: Way, sequence: Sequence, depth: int) -> None:
    """Note on the nodes below `depth` that this row comes by, unless another one of its request does."""
    for node in way.nodes[depth:]:
        row = node.rows.get(sequence.request.id)
        if row is None or not _will_pass(row, node):
            node.rows[sequence.request.id] = sequence


def _leader(node: Node, sequence: Sequence, begin: int, is_next: Callable[[Sequence], bool]) -> Sequence | None:
    """Return a row that is at this node no later than `sequence` would be if it were fed from `begin` on, if there is one."""
    own = node.rows.get(sequence.request.id)
    if own is not None and _will_pass(own, node) and own.num_prefilled >= begin:
        return own  # it came before
    # One that is alone in its request may wait itself: it does so only for who is soon there.
    return _other_leader(node, sequence, begin, lambda row: row.request.num_rows == 1 or is_next(row))


def _other_leader(node: Node, sequence: Sequence, begin: int, is_soon: Callable[[Sequence], bool]) -> Sequence | None:
    """Return such a row of another request."""
    if sequence.num_waits >= MAX_WAITS:
        return None
    for row in node.rows.values():
        if row.request is sequence.request or row.num_prefilled < begin or not _will_pass(row, node):
            continue
        if row.num_prefilled == node.num_tokens or is_soon(row):
            return row
    return None


def _will_pass(row: Sequence, node: Node) -> bool:
    """Whether a row is on its way to this node, or is planned to stop there."""
    if row.slot < 0 or row.finalizing:
        return False
    return row.num_prefilled < node.num_tokens or (row.num_prefilled == node.num_tokens and node.num_tokens in row.cuts)
