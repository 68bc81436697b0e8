import pytest

from minivllm.core.block_manager import BlockManager
from minivllm.errors import BlockError


def test_blocks_are_handed_out_from_block_0_on():
    blocks = BlockManager(3)
    assert [*blocks.take(1), *blocks.take(2)] == [0, 1, 2]


def test_the_block_freed_last_is_taken_first():
    blocks = BlockManager(3)
    blocks.take(3)
    blocks.release([0, 2])
    assert blocks.free_order() == [2, 0]
    assert blocks.take(1) == [2]


def test_a_block_is_free_only_when_its_last_holder_lets_go():
    blocks = BlockManager(1)
    taken = blocks.take(1)
    blocks.reference(taken)
    blocks.release(taken)
    assert (blocks.ref_counts, blocks.num_free) == ([1], 0)
    blocks.release(taken)
    assert (blocks.ref_counts, blocks.num_free) == ([0], 1)


def test_releasing_a_free_block_is_an_error_and_changes_nothing():
    blocks = BlockManager(2)
    blocks.take(2)
    blocks.release([0])
    with pytest.raises(BlockError, match=r"block 0 is free already.*I2"):
        blocks.release([1, 0])
    assert blocks.ref_counts == [0, 1]
    assert blocks.free_order() == [0]


@pytest.mark.parametrize("num_holders", [1, 2])
def test_releasing_a_block_twice_at_once_is_an_error_and_changes_nothing(num_holders):
    blocks = BlockManager(2)
    taken = blocks.take(2)
    for _ in range(num_holders - 1):
        blocks.reference(taken)
    with pytest.raises(BlockError, match=r"twice at once.*I2.*0, 1, 0"):
        blocks.release([0, 1, 0])
    assert blocks.ref_counts == [num_holders] * 2
    assert blocks.num_free == 0


def test_a_free_block_cannot_be_referenced():
    blocks = BlockManager(2)
    blocks.take(1)
    with pytest.raises(BlockError, match="block 1 is free"):
        blocks.reference([0, 1])
    assert blocks.ref_counts == [1, 0]


def test_taking_from_an_empty_pool_is_an_error():
    blocks = BlockManager(3)
    blocks.take(2)
    with pytest.raises(BlockError, match="2 blocks are asked for, 1 are free"):
        blocks.take(2)
    assert blocks.free_order() == [2]
    assert blocks.take(0) == []
