"""A GPU's program run on a CPU: the PTX that a kernel was compiled to, instruction by instruction.

Triton's interpreter runs what a kernel says in Python. This runs what the compiler made of it, for
a GPU that need not be here: products on tensor cores from their fragments, copies that arrive when
they are waited for, swizzled shared memory. It proves numbers and counts work; it says no times.

    parse          PTX text to instructions
    block          one program: the registers of its threads, and the memories that they see
    global_memory  the tensors of a launch, and nothing beside them
    shared_memory  of a program, in which no two warps may race
    operands       what reads and writes an instruction's operands
    arithmetic     what an instruction does within each thread
    exchange       what the threads of a warp do together
    tensor_cores   products of tiles
    steps          from instructions to functions
    code           a kernel that is ready to run
    launch         takes the place of a launch on a GPU
"""
