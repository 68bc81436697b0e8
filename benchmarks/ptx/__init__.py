"""A GPU's program run on a CPU: the PTX that a kernel was compiled to, instruction by instruction.

Triton's interpreter runs what a kernel says in Python. This runs what the compiler made of it, for
a GPU that need not be here: products on tensor cores from their fragments, copies that arrive when
they are waited for, swizzled shared memory. It proves numbers and counts work; it says no times.

    parse       PTX text to instructions
    block       the threads of one program, their registers, and the order of instructions
    arithmetic  what instructions do within each thread
    memory      global memory, inside of tensors only; shared memory, without races
    warp        what the threads of a warp do together: shuffles, fragments, tensor cores
    launch      takes the place of a launch on a GPU
"""
