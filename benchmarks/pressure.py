"""What a short KV pool costs: hit rate, evictions, preemptions, speed against pool size.

    python -m benchmarks.pressure                  16 conversations, the real model (about 5 min)
    python -m benchmarks.pressure --trace FILE     a production trace through minivllm.core alone

The first replays a chat of several conversations on one system prompt, in pools of 10 % to 200 %
of the blocks that all of its text fills, then, in the pool that just holds it, with caps on the
share that may stay cached while nobody reads it. Outputs are compared: a pool may cost time, never
a token.

The second replays a trace in the Mooncake format (benchmarks/mooncake.py says where to get one)
at capacities from 1,000 blocks to endless, with the engine's LRU, and beside it three policies
simulated outside the engine (benchmarks/policies.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from tqdm import tqdm

from benchmarks.chart import Line, line_chart
from benchmarks.conversations import Chat, ChatShape
from benchmarks.machine import machine
from benchmarks.mooncake import TraceError, read_trace, replay
from benchmarks.policies import PolicyCache, by_frequency, by_recency
from minivllm import EngineConfig, LLMEngine, SamplingParams
from minivllm.core.batch import Runner

BLOCK_SIZE = 16
SHAPE = ChatShape(conversations=16, turns=6, system_tokens=128, user_tokens=24, answer_tokens=16)
POOL_PERCENTS = (10, 15, 25, 50, 75, 100, 200)
CAP_PERCENTS = (0, 10, 25, 50, 100)
SEATS = 4
CAPACITIES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True)
class ChatFigures:
    """One replay of the chat.

    pool_percent, cap_percent  of the blocks that all text fills; of the pool
    hit_rate                   share of looked-up prompt tokens that were found
    prompt_tokens_computed     positions of prompts that were computed, again or for the first time
    tokens_per_second          generated tokens by the time of the whole replay
    first_token_seconds        median over all requests
    """

    pool_percent: int
    cap_percent: int
    num_kv_blocks: int
    hit_rate: float
    evicted_blocks: int
    preemptions: int
    prompt_tokens_computed: int
    tokens_per_second: float
    first_token_seconds: float


def replay_chat(engine: LLMEngine, shape: ChatShape) -> tuple[list[float], list[list[int]]]:
    """Run the whole chat; seconds to each request's first token, and every answer."""
    chat = Chat(shape, engine.runner.vocab_size)
    params = SamplingParams(max_tokens=shape.answer_tokens, ignore_eos=True)
    first_tokens, answers = [], []
    for turn in range(shape.turns):
        for conversation, prompt in enumerate(chat.prompts(turn)):
            engine.add_request(str(conversation), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    if output.error or output.time_to_first_token is None:
                        raise SystemExit(f"benchmarks.pressure: {output.error}")
                    first_tokens.append(output.time_to_first_token)
                    answers.append(output.token_ids)
                    chat.answer(int(output.request_id), output.token_ids)
    return first_tokens, sorted(answers)


def measure_chat(
    make_runner: Callable[[], Runner], shape: ChatShape, points: Sequence[tuple[int, int]]
) -> Iterator[ChatFigures]:
    """Figures for each (pool percent, cap percent). Raises SystemExit if an answer differs."""
    needed = shape.blocks_needed(BLOCK_SIZE)
    least = -(-shape.final_tokens // BLOCK_SIZE)
    expected = None
    for pool_percent, cap_percent in points:
        num_blocks = max(least, needed * pool_percent // 100)
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_kv_blocks=num_blocks,
            max_num_seqs=SEATS,
            prefix_cache_max_share=cap_percent / 100,
        )
        engine = LLMEngine(config, make_runner())
        started = perf_counter()
        first_tokens, answers = replay_chat(engine, shape)
        seconds = perf_counter() - started
        expected = expected or answers
        if answers != expected:
            raise SystemExit("benchmarks.pressure: the pool's size changed an answer")
        stats = engine.stats()
        yield ChatFigures(
            pool_percent,
            cap_percent,
            num_blocks,
            stats["prefix_hit_rate"],
            int(stats["evicted_blocks"]),
            int(stats["preemptions"]),
            int(stats["prompt_tokens_computed"]),
            stats["generated_tokens"] / seconds,
            median(first_tokens),
        )


@dataclass(frozen=True)
class TraceFigures:
    """Shares of all prompt blocks that were found, at one capacity; None: endless.

    lru                        minivllm.core itself
    simulated_lru, lfu, twice  benchmarks.policies
    requests_per_second        through minivllm.core, one after another
    """

    capacity: int | None
    lru: float
    simulated_lru: float
    lfu: float
    twice: float
    requests_per_second: float


def measure_trace(
    requests: Sequence[list[int]], capacities: Sequence[int], progress: bool
) -> Iterator[TraceFigures]:
    """Figures for each capacity, and for one that never evicts."""
    num_blocks = sum(len(ids) for ids in requests)
    endless = num_blocks + len(requests)
    for capacity in (*capacities, None):
        size = capacity or endless
        started = perf_counter()
        shown = tqdm(requests, desc=_capacity(capacity), unit=" requests", disable=not progress)
        hits = sum(replay(shown, size))
        seconds = perf_counter() - started
        lru, lfu, twice = (
            sum(cache.serve(ids) for ids in requests) / num_blocks
            for cache in (
                PolicyCache(size, by_recency),
                PolicyCache(size, by_frequency),
                PolicyCache(size, by_recency, times_seen=2),
            )
        )
        per_second = len(requests) / seconds
        yield TraceFigures(capacity, hits / num_blocks, lru, lfu, twice, per_second)


def _capacity(capacity: int | None) -> str:
    return "endless" if capacity is None else f"{capacity:,} blocks"


def chat_table(figures: Sequence[ChatFigures]) -> str:
    """The figures for a person."""
    lines = [
        f"{'pool':>6}{'cap':>6}{'blocks':>8}{'hit rate':>10}{'evicted':>9}{'preempted':>11}"
        f"{'prompt computed':>17}{'tokens/s':>10}{'first token':>13}"
    ]
    lines += [
        f"{f.pool_percent:>5}%{f.cap_percent:>5}%{f.num_kv_blocks:>8,}{f.hit_rate:>9.1%} "
        f"{f.evicted_blocks:>8,}{f.preemptions:>11,}{f.prompt_tokens_computed:>17,}"
        f"{f.tokens_per_second:>10.1f}{f.first_token_seconds:>11.2f} s"
        for f in figures
    ]
    return "\n".join(lines)


def trace_table(figures: Sequence[TraceFigures]) -> str:
    """The figures for a person."""
    lines = [
        f"{'capacity':>16}{'LRU':>9}{'LRU sim.':>10}{'LFU sim.':>10}{'seen twice':>12}"
        f"{'requests/s':>12}"
    ]
    lines += [
        f"{_capacity(f.capacity):>16}{f.lru:>9.2%}{f.simulated_lru:>10.2%}{f.lfu:>10.2%}"
        f"{f.twice:>12.2%}{f.requests_per_second:>12,.0f}"
        for f in figures
    ]
    return "\n".join(lines)


def chat_charts(figures: Sequence[ChatFigures]) -> dict[str, str]:
    """SVG by file name: against pool size, and against the cap."""
    pools = [f for f in figures if f.cap_percent == 100]
    caps = sorted((f for f in figures if f.pool_percent == 100), key=lambda f: f.cap_percent)
    return {
        "pressure-pool.svg": _chat_chart(
            "Hit rate and waiting against pool size",
            "pool, % of what all text fills",
            pools,
            [f.pool_percent for f in pools],
        ),
        "pressure-cap.svg": _chat_chart(
            "Hit rate and waiting against the cap on idle cached blocks",
            "cap, % of the pool",
            caps,
            [f.cap_percent for f in caps],
        ),
    }


def _chat_chart(title: str, x_name: str, rows: Sequence[ChatFigures], xs: Sequence[int]) -> str:
    fastest = max(f.tokens_per_second for f in rows)
    slowest = max(f.first_token_seconds for f in rows)
    return line_chart(
        title,
        x_name,
        "%",
        xs,
        [
            Line("hit rate", [100 * f.hit_rate for f in rows]),
            Line("tokens/s, of best", [100 * f.tokens_per_second / fastest for f in rows]),
            Line("first token, of worst", [100 * f.first_token_seconds / slowest for f in rows]),
        ],
        x_labels=[str(x) for x in xs],
    )


def trace_chart(figures: Sequence[TraceFigures]) -> str:
    """The SVG text: hit rate against capacity."""
    rows = [f for f in figures if f.capacity is not None]
    xs = [float(f.capacity or 0) for f in rows]
    return line_chart(
        "Blocks found against capacity, one hour of a chat service",
        "capacity in blocks of 512 tokens",
        "%",
        xs,
        [
            Line("LRU (the engine)", [100 * f.lru for f in rows]),
            Line("LFU", [100 * f.lfu for f in rows]),
            Line("seen twice", [100 * f.twice for f in rows]),
        ],
        x_labels=[f"{x / 1000:g}k" for x in xs],
        logarithmic=True,
    )


def main() -> int:
    """Print one of the two tables; 2 if the trace cannot be read."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.pressure", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay a production trace")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="also write SVG charts there")
    arguments = parser.parse_args()
    try:
        charts, table, rows = _trace(arguments) if arguments.trace else _chat(arguments)
    except (OSError, TraceError) as error:
        print(f"benchmarks.pressure: {error}")
        return 2
    where = machine()
    print(
        json.dumps({"machine": where, "figures": rows}) if arguments.json else f"{where}\n{table}"
    )
    if arguments.plot:
        arguments.plot.mkdir(parents=True, exist_ok=True)
        for name, text in charts.items():
            (arguments.plot / name).write_text(text)
    return 0


Report = tuple[dict[str, str], str, list[dict[str, object]]]
"""Charts by file name, the table, and the rows of the JSON."""


def _trace(arguments: argparse.Namespace) -> Report:
    requests = read_trace(arguments.trace)
    figures = list(measure_trace(requests, CAPACITIES, progress=True))
    charts = {"pressure-trace.svg": trace_chart(figures)}
    return charts, trace_table(figures), [asdict(f) for f in figures]


def _chat(arguments: argparse.Namespace) -> Report:
    # Imported late: the trace needs no torch.
    from minivllm.model.runner import ModelRunner

    runner = ModelRunner(EngineConfig(max_num_seqs=SEATS))
    points = [(percent, 100) for percent in POOL_PERCENTS]
    points += [(100, percent) for percent in CAP_PERCENTS if percent != 100]
    measured = measure_chat(lambda: runner, SHAPE, points)
    figures = list(tqdm(measured, total=len(points), unit=" replays"))
    return chat_charts(figures), chat_table(figures), [asdict(f) for f in figures]


if __name__ == "__main__":
    raise SystemExit(main())
