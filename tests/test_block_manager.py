import pytest

from minivllm.core.block_manager import BlockManager
from minivllm.errors import BlockError


def test_blocks_are_handed_out_from_block_0_on():
    blocks = BlockManager(3)
    assert [blocks.take() for _ in range(3)] == [0, 1, 2]


def test_the_block_freed_last_is_taken_first():
    blocks = BlockManager(3)
    for _ in range(3):
        blocks.take()
    blocks.release(0)
    blocks.release(2)
    assert blocks.free_order() == [2, 0]
    assert blocks.take() == 2


def test_a_block_is_free_only_when_its_last_holder_lets_go():
    blocks = BlockManager(1)
    block = blocks.take()
    blocks.reference(block)
    assert blocks.release(block) == 1
    assert blocks.num_free == 0
    assert blocks.release(block) == 0
    assert blocks.num_free == 1


def test_releasing_a_free_block_is_an_error_and_changes_nothing():
    blocks = BlockManager(2)
    block = blocks.take()
    blocks.release(block)
    with pytest.raises(BlockError, match=r"block 0 is free already.*I2"):
        blocks.release(block)
    assert blocks.ref_counts == [0, 0]
    assert sorted(blocks.free_order()) == [0, 1]


def test_a_free_block_cannot_be_referenced():
    with pytest.raises(BlockError, match="block 1 is free"):
        BlockManager(2).reference(1)


def test_taking_from_an_empty_pool_is_an_error():
    blocks = BlockManager(1)
    blocks.take()
    with pytest.raises(BlockError, match="all 1 blocks"):
        blocks.take()
