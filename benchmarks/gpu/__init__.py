"""What only a GPU can show: the kernels compiled for real, alignment in half precision, speed.

    python -m benchmarks.gpu tests    the kernel tests, launched on the card
    python -m benchmarks.gpu align    the engine against transformers, on the card
    python -m benchmarks.gpu bench    speed, each figure beside a yardstick measured in the same run
    python -m benchmarks.gpu tune     tiles and splits, each beside the engine's own choice

Each part installs nothing, needs no network, and takes under 8 minutes and 2 GB of files. It
prints each figure as it comes, and a markdown table at the end. Its JSON file, with the card's
name, is written anew after each figure: a run that is cut off leaves what it has measured.

    report.py         a figure, its table, the JSON
    measured.py       a number, or why there is none
    timing.py         functions timed in turns
    dense.py          results compared with dense attention before they are timed
    attention.py      the attention kernels: bytes and operations per second
    fused.py          the fused kernels beside torch.compile
    workload.py       nano-vllm's workload, and a model of random weights to run it on
    recordings.py     whether the engine decodes from recordings
    throughput.py     engine and transformers on that workload
    host_share.py     how much of a decode step the GPU waits for the host
    first_token.py    time to first token behind a long prefix, cold and warm
    bench.py          all speed figures, one after the other
    tune.py           other tiles and other numbers of splits
    align.py          the engine's logits beside transformers'
    launched_tests.py the kernel tests, in several processes
"""
