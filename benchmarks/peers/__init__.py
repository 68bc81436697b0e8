"""Side by side with vLLM's CPU build and with transformers: the same work, taking turns.

    python -m benchmarks.peers                      every row, 5 rounds (most of an hour)
    python -m benchmarks.peers batch-8 --rounds 3   one row
    python -m benchmarks.peers host                 what the cache costs the host, beside vLLM's
    python -m benchmarks.peers --prepare-only       only install vLLM, into .peers/

Each contestant is a process that loads the same weights once, and then waits for jobs. They take
turns (ours, peer, ours, peer, ...), so that a slow moment of the machine hits both, and only one
computes at a time. All together take about 10 GB of memory.

vLLM runs twice: as it comes, and in one process with Intel's OpenMP, which saves it the messages
between its processes.
"""
