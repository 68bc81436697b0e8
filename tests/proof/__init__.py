"""The proof: no wrong value is ever returned, and nothing is lost.

python -m tests.proof      100,000 random workloads on the real engine, each checked in full

oracle       a runner whose KV is the exact context that wrote it: I3, I4, I8
checks       I1 to I12 around every call and every step, against a model that shares no code
workloads    a tiny engine and what is done to it, from one number
play         a workload on a real engine with every check on
situations   what has been met; a proof holds only for situations that were reached
summary      the counts of many workloads, and whether they are enough
report       a failing workload, shrunk, with its story and the picture of the pool
faults       wrong answers to plant in `core`: the proof must find each of them
naive        a model of the KV cache alone, for test_cache_machine.py
"""
