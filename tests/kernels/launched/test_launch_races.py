"""What the tests of this folder know of programs that meet: program_watch.py notices them."""

import pytest
import torch
import triton
import triton.language as tl
from program_watch import RaceError

pytestmark = pytest.mark.interpreter_only


@triton.jit
def shift_kernel(numbers, count, READS: tl.constexpr, WRITES: tl.constexpr):
    """Program p reads number p + READS and writes number p + WRITES, where there is one."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    number = tl.load(numbers + program + READS, mask=program + READS < count, other=0)
    tl.store(numbers + program + WRITES, number + 1, mask=program + WRITES < count)


@triton.jit
def total_kernel(total, numbers):
    tl.store(total, tl.load(numbers + tl.program_id(0)))


@triton.jit
def hand_on_kernel(numbers, seen):
    program = tl.program_id(0)
    tl.store(seen + program, tl.load(numbers + program))
    tl.store(numbers + program + 1, 1)


def test_programs_that_keep_to_their_own_numbers_all_run_once():
    numbers = torch.zeros(35, dtype=torch.int32)
    shift_kernel[(7, 5)](numbers, 35, READS=0, WRITES=0)
    assert (numbers == 1).all()


def test_what_nobody_writes_may_be_read_by_all():
    numbers = torch.zeros(71, dtype=torch.int32)
    shift_kernel[(7, 5)](numbers, 71, READS=1, WRITES=36)
    assert numbers.tolist() == [0] * 36 + [1] * 35


def test_a_program_that_reads_its_neighbours_number_is_found():
    with pytest.raises(
        RaceError, match=r"program \(\d+, \d+, 0\) reads what \(\d+, \d+, 0\) writes"
    ):
        shift_kernel[(7, 5)](torch.zeros(35, dtype=torch.int32), 35, READS=1, WRITES=0)


def test_two_programs_that_write_one_number_are_found_even_if_they_agree():
    with pytest.raises(RaceError, match=r"the programs .* and .* write to one address"):
        total_kernel[(3,)](torch.zeros(1), torch.ones(3))


def test_what_a_mask_leaves_out_is_neither_read_nor_written():
    numbers = torch.zeros(2, dtype=torch.int32)
    shift_kernel[(1, 2)](numbers, 1, READS=1, WRITES=0)
    assert numbers.tolist() == [1, 0]


def test_programs_do_not_run_in_the_grids_order():
    seen = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(RaceError):
        hand_on_kernel[(32,)](torch.zeros(33, dtype=torch.int32), seen)
    # In order each but the first would have seen its neighbour's 1.
    assert 0 < int(seen.sum()) < 31
