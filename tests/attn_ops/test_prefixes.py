"""Keys of blocks, and which block is found for which tokens."""

from attn_ops.prefixes import MOST_CANDIDATES, Content, Match, PrefixIndex, block_keys


def filled(*prompts: list[int]) -> PrefixIndex:
    """Blocks of 3 tokens, 1 for the first prompt's first block and so on."""
    index, block = PrefixIndex(), 0
    for prompt in prompts:
        keys = block_keys(prompt, 3)
        for i, (parent, key) in enumerate(zip([b"", *keys], keys, strict=False)):
            block += 1
            index.put(block, Content(key, parent, tuple(prompt[3 * i : 3 * i + 3])))
    return index


def find(index: PrefixIndex, tokens: list[int]) -> Match:
    return index.find(tokens, block_keys(tokens, 3), 3)


def test_keys_are_the_same_everywhere():
    assert [key.hex()[:8] for key in block_keys([1, 2, 3, 4], 3)] == ["abccad42", "20fa1768"]
    known = block_keys([1, 2, 3], 3)
    assert block_keys([1, 2, 3, 4], 3, known) == block_keys([1, 2, 3, 4], 3)


def test_the_longest_part_is_found():
    index = filled([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 2, 3, 4, 5])
    assert find(index, [1, 2, 3, 4, 5, 8]) == Match((1,), 5, 6)
    assert find(index, [1, 2, 3, 4, 7, 8]) == Match((1,), 5, 4)
    assert find(index, [1, 2, 3, 4, 5, 6]) == Match((1, 2), 6)
    assert find(index, [2, 2]) == find(index, []) == Match()


def test_a_block_that_grows_is_found_by_all_its_tokens():
    index = filled([1, 2])
    grown, begun = (Content(block_keys(t, 3)[0], b"", tuple(t)) for t in ([1, 2, 3], [1]))
    index.put(1, grown)
    index.put(1, begun)  # of its first tokens no more than it says already
    assert index.contents == {1: grown}
    assert find(index, [1, 2, 3, 4]) == Match((1,), 3)
    index.drop(1)
    index.drop(1)
    assert (index.contents, index._blocks, index._children) == ({}, {}, {})


def test_equal_blocks_are_entered_once():
    assert list(filled([1, 2, 3], [1, 2, 3]).contents) == [1]


def test_few_candidates_are_compared():
    index = filled([1, 2, 2], *([1, 3, number] for number in range(MOST_CANDIDATES)))
    assert find(index, [1, 2]).num_tokens == 1
    assert find(index, [1, 2, 2]).num_tokens == 3
