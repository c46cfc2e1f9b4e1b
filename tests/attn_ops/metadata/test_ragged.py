"""The tape that random batches are read from."""

from tests.attn_ops.metadata.ragged import Tape


def test_tape_ends_with_first_choices():
    """The strategies themselves: what is drawn is what the bytes say."""
    tape = Tape(bytes([7, 2]))
    assert [tape.below(5), tape.pick("abc"), tape.below(9), tape.pick("abc")] == [2, "c", 0, "a"]
