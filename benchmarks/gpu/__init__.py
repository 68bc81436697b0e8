"""What only a GPU can show: the kernels compiled for real, alignment in half precision, speed.

    python -m benchmarks.gpu tests    the kernel tests, launched on the card
    python -m benchmarks.gpu align    the engine against transformers, on the card
    python -m benchmarks.gpu bench    speed, each figure beside a yardstick measured in the same run

Each part installs nothing, needs no network, and takes under 8 minutes and 2 GB of files. It
prints a markdown table and writes its figures as JSON, with the card's name.

    report.py         a figure, its table, the JSON
    timing.py         functions timed in turns
    attention.py      the attention kernels: bytes and operations per second
    fused.py          the fused kernels beside torch.compile
    workload.py       nano-vllm's workload, and a model of random weights to run it on
    throughput.py     engine and transformers on that workload
    first_token.py    time to first token behind a long prefix, cold and warm
    bench.py          all speed figures, one section after the other
    align.py          the engine's logits beside transformers'
    launched_tests.py the kernel tests, in several processes
"""
