"""A random workload from one number: a tiny engine, and what is done to it.

Pools hold a few dozen tokens, prompts are made of three tokens and a few openings, so within a
hundred operations prefixes are shared, blocks run out, and the same text comes back.

Every choice is drawn here, before anything runs; what depends on the engine's state ("abort a
request that waits") names a choice among those there are at that moment. So an operation may be
left out, and the others still mean the same kind of thing.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields
from random import Random

# hash function of the block keys: how many different values it returns; None is xxhash
HASHES = {"xxhash": None, "3 values": 3, "2 values": 2, "constant": 1}

VOCAB_SIZE = 6
EOS = 0
STOP = 5
PROMPT_TOKENS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Setup:
    """What the engine is made of; fields are those of EngineConfig, but for hash_name."""

    block_size: int
    num_kv_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_prefill_chunk: int | None
    max_model_len: int
    prefix_cache_max_share: float
    enable_prefix_caching: bool
    hash_name: str

    def config(self) -> dict[str, object]:
        values = {name: getattr(self, name) for name in self.__slots__ if name != "hash_name"}
        return values | {"hash_function": hash_function(self.hash_name)}

    def __str__(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in self.__slots__)


def hash_function(name: str):
    """A function with so few values that different blocks collide; None for "xxhash"."""
    num_values = HASHES[name]
    if num_values is None:
        return None
    return lambda data: bytes([zlib.crc32(data) % num_values])


@dataclass(frozen=True, slots=True)
class Add:
    """Add a request. With `continues`, its prompt is an earlier text and then `prompt`."""

    name: str
    prompt: tuple[int, ...]
    continues: int | None = None
    max_tokens: int = 4
    n: int = 1
    stops: bool = False
    ignore_eos: bool = True
    salt: str | None = None
    adapter: str | None = None
    read: bool = True
    write: bool = True
    cacheable: int | None = None

    def __str__(self) -> str:
        changed = [
            f"{field}={getattr(self, field)!r}"
            for field, default in _DEFAULTS.items()
            if getattr(self, field) != default
        ]
        return f"add {self.name} {' '.join(map(str, self.prompt))}   {' '.join(changed)}".rstrip()


_DEFAULTS = {
    field.name: field.default for field in fields(Add) if field.name not in ("name", "prompt")
}


@dataclass(frozen=True, slots=True)
class Step:
    def __str__(self) -> str:
        return "step"


@dataclass(frozen=True, slots=True)
class Drain:
    def __str__(self) -> str:
        return "step until nothing is left"


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort one of the requests in `state`, see play.py; nothing if there is none."""

    state: str
    choice: int

    def __str__(self) -> str:
        return f"abort a request: {self.state}, choice {self.choice}"


@dataclass(frozen=True, slots=True)
class Reset:
    def __str__(self) -> str:
        return "reset the prefix cache"


@dataclass(frozen=True, slots=True)
class LoadWeights:
    path: str

    def __str__(self) -> str:
        return f"load weights {self.path}"


@dataclass(frozen=True, slots=True)
class Fail:
    """Step `times` times while the runner fails: after so many slots written, or otherwise."""

    kind: str  # "error" | "interrupt" | "wrong answer"
    after: int
    times: int

    def __str__(self) -> str:
        return f"step {self.times}x while the runner fails: {self.kind} after {self.after} slots"


Operation = Add | Step | Drain | Abort | Reset | LoadWeights | Fail


@dataclass(frozen=True, slots=True)
class Workload:
    seed: int
    setup: Setup
    operations: tuple[Operation, ...]


def make_workload(seed: int, hash_name: str | None = None) -> Workload:
    """The workload of this number, always the same; `hash_name` sets its hash function."""
    # Neighbouring seeds of Random begin alike; a string is hashed first.
    rng = Random(f"workload {seed}")
    setup = _setup(rng, hash_name)
    return Workload(seed, setup, tuple(_operations(rng, setup)))


def _setup(rng: Random, hash_name: str | None) -> Setup:
    block_size = rng.randint(1, 8)
    num_tokens = rng.randint(12, 56)  # of the whole pool
    drawn = rng.choices(list(HASHES), [16, 1, 1, 1])[0]
    return Setup(
        block_size=block_size,
        num_kv_blocks=max(2, num_tokens // block_size),
        max_num_batched_tokens=rng.choice([1, 2, 3, 4, 4, 6, 6, 8, 8, 8, 12, 12, 16, 24]),
        max_num_seqs=rng.choice([1, 2, 3, 3, 4, 4, 6]),
        max_prefill_chunk=rng.choice([None, None, None, 1, 2, 3, 5, 8]),
        max_model_len=rng.choice([200, 200, 200, 24]),
        prefix_cache_max_share=rng.choice([1.0, 1.0, 1.0, 1.0, 0.5, 0.2, 0.0]),
        enable_prefix_caching=rng.random() < 0.94,
        hash_name=hash_name or drawn,
    )


def _operations(rng: Random, setup: Setup) -> list[Operation]:
    openings = _openings(rng, setup)
    operations: list[Operation] = []
    num_requests = rng.randint(4, 13)
    pace = rng.choice([1, 2, 3, 5])  # steps between two requests, on average
    for i in range(num_requests):
        operations.append(_request(rng, setup, f"r{i}", openings))
        if rng.random() < 0.04:
            operations.append(_interference(rng))
        if rng.random() < 0.4:  # two or more arrive together
            continue
        for _ in range(rng.randint(0, 2 * pace)):
            operations.append(Step())
            if rng.random() < 0.1:
                operations.append(_interference(rng))
        if rng.random() < 0.06:
            operations.append(Drain())
            if rng.random() < 0.5:
                operations.append(rng.choice([Reset(), LoadWeights("second")]))
    return operations


def _openings(rng: Random, setup: Setup) -> list[tuple[int, ...]]:
    """Prefixes of one text: of whole blocks, and of any length."""
    size = setup.block_size
    longest = max(1, min(4 * size, size * setup.num_kv_blocks * 2 // 3))
    text = tuple(rng.choices(PROMPT_TOKENS, k=longest))
    lengths = [0, rng.randint(1, longest), min(size * rng.randint(1, 3), longest), longest]
    return [text[:length] for length in lengths]


def _request(rng: Random, setup: Setup, name: str, openings: list[tuple[int, ...]]) -> Add:
    room = setup.block_size * setup.num_kv_blocks
    tail = tuple(rng.choices(PROMPT_TOKENS, k=rng.randint(0, setup.block_size + 2)))
    continues = rng.randrange(8) if rng.random() < 0.2 else None
    prompt = tail if continues is not None else rng.choice(openings) + tail
    if rng.random() < 0.02:
        prompt = tuple(rng.choices(PROMPT_TOKENS, k=room + rng.randint(0, 3)))
    return Add(
        name=f"{name}" if rng.random() > 0.02 else "r0",  # an id that may still be in use
        prompt=prompt,
        continues=continues,
        max_tokens=rng.choice([1, 1, 2, 3, 5, 8, 8, 12, 20]),
        n=rng.choices([1, 2, 3], [14, 1, 1])[0],
        stops=rng.random() < 0.15,
        ignore_eos=rng.random() < 0.75,
        salt=rng.choice("ab") if rng.random() < 0.08 else None,
        adapter=rng.choice("ab") if rng.random() < 0.06 else None,
        read=rng.random() > 0.1,
        write=rng.random() > 0.05,
        cacheable=rng.randint(0, 3 * setup.block_size) if rng.random() < 0.06 else None,
    )


def _interference(rng: Random) -> Operation:
    draw = rng.random()
    if draw < 0.45:
        states = ["waiting", "chunk", "decoding", "leader", "leader", "preempted", "nobody"]
        return Abort(rng.choice(states), rng.randrange(4))
    if draw < 0.8:
        kind = rng.choice(["error", "error", "interrupt", "wrong answer"])
        return Fail(kind, rng.choice([0, 0, 1, 2, 4, 9]), rng.choice([1, 1, 1, 2, 5]))
    if draw < 0.92:
        return Reset()
    return LoadWeights(rng.choice(["second", "third"]))
