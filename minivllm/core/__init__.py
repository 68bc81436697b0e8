"""The wing that decides: who runs, which blocks, what is cached. Pure Python and xxhash."""
