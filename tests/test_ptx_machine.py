"""The machine that runs PTX on a CPU, by itself: its memories, its arithmetic, its tiles.

tests/kernels/test_kernels_as_compiled.py runs our kernels on it.
"""

import math

import numpy as np
import pytest
import torch

from benchmarks.ptx import tensor_cores
from benchmarks.ptx.arithmetic import bits_to_float, float_to_bits, signature
from benchmarks.ptx.block import Block
from benchmarks.ptx.code import Code
from benchmarks.ptx.global_memory import GlobalMemory
from benchmarks.ptx.parse import Address, Immediate, PtxError, Register, Vector, parse
from benchmarks.ptx.shared_memory import SharedMemory

LANES = np.arange(32)
NAN = float("nan")


def program(body, num_threads=32):
    """A kernel with one parameter, `%rd0` after the first line, and a few registers."""
    return parse(
        f""".visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid {num_threads}
{{
	.reg .pred 	%p<4>;
	.reg .b16 	%rs<4>;
	.reg .b32 	%r<20>;
	.reg .b64 	%rd<9>;
	.loc	1 7 0                         // kernel.py:7:0
	ld.param.b64 	%rd0, [kernel_param_0];
	mov.u32 	%r0, %tid.x;
	mul.wide.u32 	%rd1, %r0, 4;
	add.s64 	%rd2, %rd0, %rd1;              // the thread's own element
{body}
	ret;
}}
"""
    )


def run(body, tensor, num_threads=32, shared_bytes=1024):
    """Run it over a tensor of 4-byte numbers; returns the block as the program left it."""
    parsed = program(body, num_threads)
    block = Block(
        parsed,
        special={"%tid.x": np.arange(num_threads, dtype=np.uint32)},
        parameters={"kernel_param_0": np.array(tensor.data_ptr(), np.uint64)},
        memory=GlobalMemory({"tensor": tensor}),
        shared=SharedMemory(shared_bytes),
    )
    Code(parsed).run(block)
    return block


def test_ptx_is_read_with_predicates_vectors_addresses_and_its_place_in_python():
    body = "$L_again:\n\t@!%p1 ld.global.v2.b32 { %r1, _ }, [ %rd2 + 0x10 ];\n\tbra.uni \t$L_again;"
    parsed = program(body)
    load = parsed.instructions[4]
    assert load.opcode == ("ld", "global", "v2", "b32")
    assert load.operands == (
        Vector((Register("%r1"), Register("_"))),
        Address(Register("%rd2"), 16),
    )
    assert load.predicate == ("%p1", False)
    assert load.source == "kernel.py:7"
    assert parsed.labels == {"$L_again": 4}
    assert parsed.instructions[2].operands[2] == Immediate(4)
    assert parsed.num_threads == 32
    assert ("%r", "b32", 20) in parsed.registers


@pytest.mark.parametrize(
    "body", ["\tadd.s32 %r1 %r2;;", "\tfoo", "\t{ .reg .pred p; mov.pred %p1, p; }"]
)
def test_what_cannot_be_read_is_refused(body):
    with pytest.raises(PtxError, match=r"cannot read the line|unknown instruction"):
        run(body, torch.zeros(32))


@pytest.mark.parametrize(
    "text",
    [
        "add.f64 %rd3, %rd4, %rd5;",
        "cvt.rzi.s32.f32 %r1, %r2;",
        "setp.lt.and.s32 %p1, %r1, %r2, %p2;",
        "mul.lo %r1, %r2, %r3;",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r2}, {%r3}, {%r4};",
        "shfl.sync.up.b32 %r1, %r2, 1, 0, -1;",
        "atom.global.add.u32 %r1, [%rd2], 1;",
        "ld.local.b32 %r1, [%rd2];",
        "st.shared::cluster.b32 [%r1], %r2;",
        "add.rn.bf16 %rs1, %rs2, %rs3;",
        "setp.lt.bf16 %p1, %rs2, %rs3;",
        "cvt.rz.bf16x2.f32 %r1, %r2, %r3;",
        "cvt.rn.relu.f16.f32 %rs1, %r2;",
        "add.sat.s32 %r1, %r2, %r3;",
        "fma.rz.f32 %r1, %r2, %r3, %r4;",
        "bar.sync 1, 32;",
        "bar.arrive 0, 32;",
        "fence.acq_rel.gpu;",
        "shfl.sync.bfly.b32 %r1, %r2, 16, 15, -1;",
        "shfl.sync.idx.b32 %r1, %r2, 5, 31, 255;",
    ],
)
def test_an_instruction_that_is_not_known_is_refused_by_name(text):
    with pytest.raises(PtxError, match="unknown instruction"):
        run(text, torch.zeros(32))


def test_threads_read_and_write_their_own_elements():
    tensor = torch.arange(32, dtype=torch.float32)
    run(
        "\tld.global.b32 %r1, [%rd2];\n\tmul.f32 %r2, %r1, 0f40000000;\n"
        "\tsetp.lt.u32 %p1, %r0, 3;\n\t@%p1 st.global.b32 [%rd2 + 0], %r2;",
        tensor,
    )
    assert tensor.tolist() == [0, 2, 4, *range(3, 32)]


def test_a_loop_ends_when_its_branch_says_so():
    tensor = torch.zeros(32, dtype=torch.int32)
    run(
        "\tmov.b32 %r1, 0;\n$L_again:\n\tadd.s32 %r1, %r1, 2;\n\tsetp.lt.s32 %p1, %r1, 9;\n"
        "\t@%p1 bra $L_again;\n\tst.global.b32 [%rd2], %r1;",
        tensor,
    )
    assert tensor.tolist() == [10] * 32


def test_a_branch_that_some_threads_take_is_refused():
    body = "\tsetp.lt.s32 %p1, %r0, 9;\n\t@%p1 bra $L_end;\n$L_end:"
    with pytest.raises(PtxError, match=r"(?s)kernel\.py:7: @%p1 bra.*some threads"):
        run(body, torch.zeros(32))


def test_registers_are_packed_and_unpacked_lowest_first():
    block = run(
        "\tmov.b32 %r1, 0x12345678;\n\tmov.b32 {%rs1, %rs2}, %r1;\n\tmov.b32 %r2, {%rs2, %rs1};\n"
        "\tmov.b64 %rd3, {%r1, %r2};\n\tmov.b64 {_, %r3}, %rd3;",
        torch.zeros(32),
    )
    assert hex(block.registers["%rs1"][0]) == "0x5678"
    assert hex(block.registers["%r2"][0]) == "0x56781234"
    assert hex(block.registers["%rd3"][0]) == "0x5678123412345678"
    assert (block.registers["%r3"] == block.registers["%r2"]).all()


def test_a_register_called_nothing_is_not_written():
    tensor = torch.arange(64, dtype=torch.int32)
    body = "\tshl.b64 %rd3, %rd1, 1;\n\tadd.s64 %rd4, %rd0, %rd3;\n"
    block = run(body + "\tld.global.v2.b32 {_, %r1}, [%rd4];", tensor)
    assert block.registers["%r1"].tolist() == [*range(1, 64, 2)]


def test_copies_are_waited_for_by_all_threads():
    body = "\tsetp.lt.s32 %p1, %r0, 3;\n\t@%p1 cp.async.wait_group 0;"
    with pytest.raises(PtxError, match="only some threads"):
        run(body, torch.zeros(32))


def test_a_register_nobody_wrote_is_nan_and_nowhere():
    block = run("", torch.zeros(32))
    assert np.isnan(block.registers["%r5"].view(np.float32)).all()
    with pytest.raises(PtxError, match="illegal address"):
        run("\tshl.b64 %rd6, %rd5, 2;\n\tld.global.b32 %r1, [%rd6];", torch.zeros(32))


# Memory


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r1, [%rd2 + 4];", "illegal address: 0 bytes outside of tensor"),
        ("ld.global.b32 %r1, [%rd2 + 400];", "illegal address: 272 bytes outside of tensor"),
        ("st.global.b32 [%rd2 + -4], %r1;", "illegal address: 4 bytes outside of tensor"),
        ("ld.global.b32 %r1, [%rd2 + 2];", "misaligned address: 4 bytes"),
        ("ld.global.v2.b32 {%r1, %r2}, [%rd2];", "misaligned address: 8 bytes"),
    ],
)
def test_an_address_that_a_gpu_would_end_the_launch_for(body, message):
    with pytest.raises(PtxError, match=message):
        run("\t" + body, torch.zeros(32))


def test_sectors_are_counted_once_for_each_instruction_of_a_warp():
    tensor = torch.zeros(64)
    block = run("\tld.global.b32 %r1, [%rd2];\n" * 3, tensor, num_threads=64)
    assert (block.memory.bytes_moved, block.memory.bytes_touched) == (3 * 64 * 4, 64 * 4)
    # 8 numbers apart: each thread asks for a sector of its own.
    body = "\tshl.b64 %rd3, %rd1, 3;\n\tadd.s64 %rd4, %rd0, %rd3;\n\tst.global.b32 [%rd4], %r0;"
    assert run(body, torch.zeros(256)).memory.num_requests == 32


def words(*values):
    return np.array(values, np.uint32)[:, None].view(np.uint8)


@pytest.mark.parametrize(
    ("stride", "turns"), [(1, 1), (2, 2), (3, 1), (8, 8), (32, 32), (33, 1), (0, 1)]
)
def test_threads_that_meet_at_a_bank_take_turns(stride, turns):
    memory = SharedMemory(32 * 33 * 4)
    memory.read(LANES * stride * 4, 4, LANES)
    assert (memory.wavefronts, memory.least_wavefronts) == (turns, 1)


def test_wide_accesses_of_a_warp_take_as_many_turns_as_they_must():
    memory = SharedMemory(32 * 16)
    memory.read(LANES * 16, 16, LANES)
    assert (memory.wavefronts, memory.least_wavefronts) == (4, 4)


ONE, OTHER = np.array([0]), np.array([32])  # a thread of the first warp, and of the second
PLACE = np.array([64])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("write", "read", "read what another warp has written"),
        ("write", "write", "written by two warps"),
        ("read", "write", "written where another warp has read"),
        ("write", "hold", "read before a barrier"),
    ],
)
def test_two_warps_that_meet_between_two_barriers_race(first, second, message):
    def act(memory, what, thread):
        if what == "write":
            memory.write(PLACE, words(thread[0]), thread)
        elif what == "read":
            memory.read(PLACE, 4, thread)
        else:
            memory.fence()
            memory.hold(PLACE, 4)

    memory = SharedMemory(128)
    act(memory, first, ONE)
    with pytest.raises(PtxError, match=f"race: shared memory at 64 is {message}"):
        act(memory, second, OTHER)
    memory = SharedMemory(128)
    act(memory, first, ONE)
    act(memory, first, ONE)  # a warp does not race with itself
    memory.barrier()
    act(memory, second, OTHER)


def test_of_several_warps_that_read_each_is_known():
    memory = SharedMemory(128)
    both = np.concatenate((ONE, OTHER))
    memory.read(np.repeat(PLACE, 2), 4, both)
    for thread in (ONE, OTHER):
        with pytest.raises(PtxError, match="another warp has read"):
            memory.write(PLACE, words(1), thread)


def test_two_values_for_one_place_race_and_one_value_twice_does_not():
    memory = SharedMemory(128)
    both, places = np.concatenate((ONE, OTHER)), np.repeat(PLACE, 2)
    memory.write(places, words(7, 7), both)
    memory.barrier()
    with pytest.raises(PtxError, match="given two values at once"):
        memory.write(places, words(7, 8), both)


def test_halves_of_a_word_belong_to_who_wrote_them():
    memory = SharedMemory(128)
    memory.write(PLACE, words(1)[:, :2], ONE)
    memory.write(PLACE + 2, words(1)[:, :2], OTHER)
    with pytest.raises(PtxError, match="race"):
        memory.read(PLACE, 4, ONE)


def test_a_copy_arrives_when_it_is_waited_for_and_not_before():
    memory = SharedMemory(128)
    for number in (1, 2):
        memory.begin_copy(PLACE + 4 * number, words(number), ONE)
        memory.commit_group()
    with pytest.raises(PtxError, match="read before the copy was waited for"):
        memory.read(PLACE + 4, 4, ONE)
    with pytest.raises(PtxError, match="written where a copy is to arrive"):
        memory.write(PLACE + 4, words(9), ONE)
    memory.wait_group(1)
    assert memory.read(PLACE + 4, 4, ONE).view(np.uint32) == 1
    with pytest.raises(PtxError, match="read before the copy was waited for"):
        memory.read(PLACE + 8, 4, ONE)
    with pytest.raises(PtxError, match="another warp"):  # that has not waited
        memory.read(PLACE + 4, 4, OTHER)
    with pytest.raises(PtxError, match="ended with copies under way"):
        memory.finish()
    memory.wait_group(0)
    memory.finish()


def test_what_tensor_cores_read_is_fenced_before_and_held_until_they_are_waited_for():
    memory = SharedMemory(128)
    memory.write(PLACE, words(1), ONE)
    memory.barrier()
    with pytest.raises(PtxError, match="read by tensor cores before a fence"):
        memory.hold(PLACE, 4)
    memory.fence()
    assert memory.hold(PLACE, 4).view(np.uint32) == 1
    memory.barrier()
    with pytest.raises(PtxError, match="written while tensor cores read it"):
        memory.write(PLACE, words(2), ONE)
    with pytest.raises(PtxError, match="written while tensor cores read it"):
        memory.begin_copy(PLACE, words(2), ONE)
    memory.release(PLACE, 4)
    memory.barrier()
    memory.write(PLACE, words(2), ONE)


@pytest.mark.parametrize(("address", "width"), [(62, 4), (128, 4), (-4, 4), (120, 16), (5, 1)])
def test_shared_memory_has_an_end_and_takes_whole_numbers(address, width):
    with pytest.raises(PtxError, match="shared memory"):
        SharedMemory(128).read(np.array([address]), width, ONE)


# Arithmetic


def compute(text, *values, dtype=np.float32):
    """The first element of what an instruction makes of numbers."""
    (instruction,) = [each for each in program(text).instructions if each.text == text]
    operation = signature(instruction).operation
    return operation(*[np.atleast_1d(np.array(value, dtype)) for value in values])[0]


@pytest.mark.parametrize(
    ("text", "values", "want"),
    [
        ("max.f32 %r1, %r2, %r3;", (NAN, 2), 2),
        ("max.f32 %r1, %r2, %r3, %r4;", (5, 9, 7), 9),
        ("min.f32 %r1, %r2, %r3;", (-1, NAN), -1),
        ("fma.rn.f32 %r1, %r2, %r3, %r4;", (1 + 2**-12, 1 + 2**-12, -1 - 2**-11), 2**-24),
        ("mul.ftz.f32 %r1, %r2, %r3;", (1e-30, 1e-10), 0),
        ("ex2.approx.ftz.f32 %r1, %r2;", (-math.inf,), 0),
        ("ex2.approx.ftz.f32 %r1, %r2;", (3,), 8),
        ("rsqrt.approx.f32 %r1, %r2;", (16,), 0.25),
        ("div.full.f32 %r1, %r2, %r3;", (1, 4), 0.25),
        ("setp.lt.f32 %p1, %r2, %r3;", (NAN, 1), False),
        ("setp.ltu.f32 %p1, %r2, %r3;", (NAN, 1), True),
        ("setp.ne.f32 %p1, %r2, %r3;", (NAN, 1), False),
        ("setp.neu.f32 %p1, %r2, %r3;", (NAN, 1), True),
        ("setp.neu.f32 %p1, %r2, %r3;", (1, 1), False),
        ("setp.equ.f32 %p1, %r2, %r3;", (NAN, 1), True),
        ("setp.geu.f32 %p1, %r2, %r3;", (1, 2), False),
    ],
)
def test_floats(text, values, want):
    assert compute(text, *values) == want


@pytest.mark.parametrize(
    ("text", "values", "want"),
    [
        ("div.s32 %r1, %r2, %r3;", (-7, 2), -3),
        ("rem.s32 %r1, %r2, %r3;", (-7, 2), -1),
        ("mul.wide.s32 %rd1, %r2, %r3;", (2**30, -4), -(2**32)),
        ("mul.hi.s32 %r1, %r2, %r3;", (2**30, 8), 2),
        ("mul.lo.s32 %r1, %r2, %r3;", (2**30, 4), 0),
        ("mad.wide.s32 %rd1, %r2, %r3, %rd4;", (2**30, 4, 5), 2**32 + 5),
        ("shr.s32 %r1, %r2, %r3;", (-8, 1), -4),
        ("shl.b32 %r1, %r2, %r3;", (1, 32), 0),
        ("bfe.s32 %r1, %r2, %r3, %r4;", (0b0110, 1, 2), -1),
        ("neg.s32 %r1, %r2;", (5,), -5),
        ("setp.ne.s32 %p1, %r2, %r3;", (1, 2), True),
        ("selp.b32 %r1, %r2, %r3, %p1;", (1, 2, 0), 2),
    ],
)
def test_whole_numbers(text, values, want):
    assert compute(text, *values, dtype=np.int32) == want


def test_bits_are_taken_out_of_the_middle():
    assert compute("bfe.u32 %r1, %r2, %r3, %r4;", 0b1101_0000, 4, 3, dtype=np.uint32) == 0b101
    assert compute("shr.u32 %r1, %r2, %r3;", 2**31, 31, dtype=np.uint32) == 1


def test_bits_outside_of_a_register_are_refused():
    with pytest.raises(PtxError, match="bits outside"):
        compute("bfe.u32 %r1, %r2, %r3, %r4;", 1, 28, 8, dtype=np.uint32)


@pytest.mark.parametrize(
    ("choice", "want"), [(0x5410, 0x2211_6655), (0x7632, 0x4433_8877), (0x3210, 0x8877_6655),
                         (0x0008, 0x5555_5500), (0x000B, 0x5555_55FF)]
)  # fmt: skip
def test_bytes_of_two_registers_are_chosen(choice, want):
    found = compute(
        "prmt.b32 %r1, %r2, %r3, %r4;", 0x8877_6655, 0x4433_2211, choice, dtype=np.uint32
    )
    assert hex(found) == hex(want)


def test_bfloat16_is_rounded_as_torch_rounds_it():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e3
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, math.inf, -0.0, 1e-40])
    values = torch.cat((values, ties))
    found = bits_to_float(float_to_bits(values.numpy()))
    assert (torch.from_numpy(found) == values.bfloat16().float()).all()
    assert np.isnan(bits_to_float(float_to_bits(np.array([NAN], np.float32))))


def test_pairs_of_halves_and_of_floats():
    pair = compute("cvt.rn.bf16x2.f32 %r1, %r2, %r3;", 1.0, 2.0)
    assert hex(pair) == "0x3f804000"  # the first operand is the upper half
    assert hex(compute("cvt.rn.f16x2.f32 %r1, %r2, %r3;", 1.0, 2.0)) == "0x3c004000"
    two = np.array([1, 2, 3, 4], np.float32).view(np.uint64)
    (instruction,) = program("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;").instructions[4:-1]
    found = signature(instruction).operation(two, two, two)
    assert found.view(np.float32).tolist() == [2, 6, 12, 20]


# Tiles


def test_the_fragments_of_a_product_lie_where_the_ptx_isa_says():
    """Thread 4 r + c holds columns 2 c and 2 c + 1 of row r of each quarter."""
    tile = np.arange(256, dtype=np.float16).reshape(16, 16)
    registers = np.empty((4, 32), np.uint32)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        for number, (down, right) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            pair = tile[row + down, column + right : column + right + 2]
            registers[number, lane] = pair.copy().view(np.uint32)[0]
    assert (tensor_cores.left_tiles(registers, "f16")[0] == tile).all()
    # The right one: a pair is two rows of a column.
    registers = np.empty((2, 32), np.uint32)
    for lane in range(32):
        column, row = lane // 4, 2 * (lane % 4)
        for number in (0, 1):
            pair = tile[row + 8 * number : row + 8 * number + 2, column]
            registers[number, lane] = pair.copy().view(np.uint32)[0]
    assert (tensor_cores.right_tiles(registers, "f16")[0] == tile[:, :8]).all()


def test_the_fragments_of_a_sum_lie_where_the_ptx_isa_says():
    sums = np.arange(2 * 16 * 24, dtype=np.float32).reshape(2, 16, 24)  # of two warps
    registers = tensor_cores.sum_fragments(sums)
    assert registers.shape == (12, 64)
    for thread in (0, 5, 31, 32, 63):
        warp, lane = divmod(thread, 32)
        for number in range(12):
            eight, down, second = number // 4, number // 2 % 2, number % 2
            row, column = lane // 4 + 8 * down, 8 * eight + 2 * (lane % 4) + second
            assert registers[number, thread] == sums[warp, row, column]
    assert (tensor_cores.sum_tiles(registers) == sums).all()


@pytest.mark.parametrize(("code", "length"), [(1, 128), (2, 64), (3, 32)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_tile_in_shared_memory_lies_in_swizzled_lines(code, length, turned):
    """Written line by line, 16 bytes at a time, each moved as its line's number says."""
    tile = np.arange(64 * 16, dtype=np.float16).reshape(64, 16)
    lines = tile.T if turned else tile  # [lines, numbers]
    memory = SharedMemory(16_384)
    below, beside = 8 * length, 4096  # how far apart pieces lie
    for line, chunk in np.ndindex(lines.shape[0], lines.shape[1] // 8):
        piece, within = divmod(16 * chunk, length)
        place = 1024 + line // 8 * below + line % 8 * length + piece * beside + within
        place ^= (place // 128 % (length // 16)) * 16
        values = np.ascontiguousarray(lines[line, 8 * chunk : 8 * chunk + 8])
        memory.write(np.array([place]), values.view(np.uint8)[None], ONE)
    memory.barrier()
    memory.fence()
    descriptor = 1024 >> 4 | beside >> 4 << 16 | below >> 4 << 32 | code << 62
    assert (tensor_cores.SharedTile(descriptor, 64, turned).hold(memory, "f16") == tile).all()
    with pytest.raises(PtxError, match="unknown layout"):
        tensor_cores.SharedTile(0, 64, turned).hold(memory, "f16")


def test_ldmatrix_and_stmatrix_are_each_others_way_back():
    """Rows of 8 numbers; the thread 4 r + c gets the pair c of row r, or of column r."""
    numbers = torch.arange(64, dtype=torch.int16)
    body = (
        "\tand.b32 %r1, %r0, 7;\n\tshl.b32 %r2, %r1, 4;\n\tmul.wide.u32 %rd3, %r1, 16;\n"
        "\tadd.s64 %rd4, %rd0, %rd3;\n"
        "\tld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd4];\n"
        "\tst.shared.v4.b32 [%r2], {%r4, %r5, %r6, %r7};\n"
        "\tldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r8}, [%r2];\n"
        "\tldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r9}, [%r2];\n"
        "\tadd.s32 %r3, %r2, 512;\n"
        "\tstmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r3], {%r9};\n"
        "\tldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r3];"
    )
    block = run(body, numbers)
    pairs = block.registers["%r8"].view(np.int16).reshape(32, 2)
    assert pairs.tolist() == [[2 * thread, 2 * thread + 1] for thread in range(32)]
    turned = block.registers["%r9"].view(np.int16).reshape(8, 4, 2)
    assert (turned.reshape(8, 8) == numbers.reshape(8, 8).T.numpy()).all()
    assert (block.registers["%r10"] == block.registers["%r8"]).all()


def test_threads_of_a_warp_exchange_and_add():
    body = (
        "\tshfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;\n\tshfl.sync.idx.b32 %r2, %r0, 5, 31, -1;\n"
        "\tredux.sync.add.s32 %r3, %r0, -1;"
    )
    block = run(body, torch.zeros(64), num_threads=64)
    assert block.registers["%r1"].tolist() == [thread ^ 1 for thread in range(64)]
    assert block.registers["%r2"].tolist() == [5] * 32 + [37] * 32
    assert block.registers["%r3"].tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32


def test_a_product_that_nobody_waits_for_is_noticed():
    body = (
        "\tmov.b64 %rd5, 4611686018427387904;\n"  # at 0, in lines of 128 bytes
        "\twgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1,%r2,%r3,%r4}, %rd5, %rd5,"
        " 0, 1, 1, 0, 0;\n\twgmma.commit_group.sync.aligned;"
    )
    with pytest.raises(PtxError, match="ended with products under way"):
        run(body, torch.zeros(128), num_threads=128)
