"""Which blocks of a cache hold which tokens: so that requests with equal prompts share them.

A block is named by a key of all tokens from the first one to its last. The key is a digest of the
key before it and the block's tokens, so it is the same in every process.
"""

import dataclasses
import hashlib
import itertools
from array import array
from collections.abc import Sequence

Key = bytes
ROOT: Key = b""
"""What stands before the first block."""

MOST_CANDIDATES = 32
"""Blocks that are compared token by token with the rest of a prompt."""


@dataclasses.dataclass(frozen=True)
class Content:
    """Tokens whose keys and values a block holds, from its first slot on."""

    key: Key
    parent: Key  # of the block before
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Match:
    """What a cache holds of a prompt.

    Attributes:
        blocks: full blocks, which several requests may own.
        num_tokens: that need not be computed: those of `blocks`, and those that are copied.
        source: the block whose first tokens are copied; None: none are.
        window_blocks: the same blocks of layers with a window, where they have their own: the null
            block for those behind it. None: they have not.
    """

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0
    source: int | None = None
    window_blocks: tuple[int, ...] | None = None

    @property
    def of_windows(self) -> "Match":
        """The match in the blocks of layers with a window."""
        return Match(self.window_blocks or (), self.num_tokens)


NO_MATCH = Match()


def block_keys(tokens: Sequence[int], block_size: int, known: Sequence[Key] = ()) -> list[Key]:
    """Keys of the blocks of `tokens`; the last block need not be full.

    Args:
        tokens: from the first token of a request on.
        block_size: tokens a block holds.
        known: keys of the first blocks, all of them full.
    """
    keys = list(known)
    parent = keys[-1] if keys else ROOT
    data = array("q", tokens[len(keys) * block_size :]).tobytes()
    size = 8 * block_size  # bytes
    for begin in range(0, len(data), size):
        parent = hashlib.blake2b(parent + data[begin : begin + size], digest_size=16).digest()
        keys.append(parent)
    return keys


class PrefixIndex:
    """Blocks by what they hold.

    Attributes:
        contents: by block, in the order in which they came.
    """

    def __init__(self) -> None:
        self.contents: dict[int, Content] = {}
        self._blocks: dict[Key, int] = {}
        self._children: dict[tuple[Key, int], dict[int, None]] = {}

    def put(self, block: int, content: Content) -> None:
        """Say what a block holds; where another block holds the same, it is not kept twice."""
        old = self.contents.get(block)
        if old is not None and len(old.tokens) >= len(content.tokens):
            return
        self.drop(block)
        if content.key not in self._blocks:
            self.contents[block] = content
            self._enter(block, content)

    def drop(self, block: int) -> None:
        """The block holds nothing any more."""
        content = self.contents.pop(block, None)
        if content is None:
            return
        self._blocks.pop(content.key, None)
        place = content.parent, content.tokens[0]
        children = self._children.get(place, {})
        children.pop(block, None)
        if not children:
            self._children.pop(place, None)

    def find(self, tokens: Sequence[int], keys: Sequence[Key], block_size: int) -> Match:
        """The longest part of `tokens` that is held; `keys` are those of its full blocks."""
        blocks: list[int] = []
        for key in itertools.islice(keys, len(tokens) // block_size):
            block = self._blocks.get(key)
            if block is None:
                break
            blocks.append(block)
        begin = len(blocks) * block_size
        parent = keys[len(blocks) - 1] if blocks else ROOT
        source, number = self._longest(parent, tuple(tokens[begin : begin + block_size]))
        return Match(tuple(blocks), begin + number, source)

    def block_of(self, key: Key) -> int | None:
        """The full block with a key; None: it is not held."""
        return self._blocks.get(key)

    def _longest(self, parent: Key, rest: tuple[int, ...]) -> tuple[int | None, int]:
        """The block that begins with the most tokens of `rest`, and how many they are."""
        source, most = None, 0
        children = self._children.get((parent, rest[0]), {}) if rest else {}
        for block in itertools.islice(reversed(children), MOST_CANDIDATES):
            pairs = zip(self.contents[block].tokens, rest, strict=False)
            number = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if number > most:
                source, most = block, number
        return source, most

    def _enter(self, block: int, content: Content) -> None:
        self._blocks[content.key] = block
        self._children.setdefault((content.parent, content.tokens[0]), {})[block] = None
