"""The engine's stats for a person, and for a Prometheus server."""

from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from rich.console import Console
from rich.table import Column, Table

Stats = Mapping[str, int | float]

# name -> (Counter: only ever grows, or Gauge: how it stands now; what it says)
MEANINGS = {
    "steps": (Counter, "Steps whose results were committed"),
    "num_waiting": (Gauge, "Sequences that wait"),
    "num_running": (Gauge, "Sequences that run"),
    "preemptions": (Counter, "Times a running sequence lost its blocks and waited again"),
    "prompt_tokens_computed": (Counter, "Prompt positions whose KV was computed"),
    "generated_tokens": (Counter, "Tokens generated"),
    "prefix_query_tokens": (Counter, "Prompt tokens looked up in the prefix cache"),
    "prefix_hit_tokens": (Counter, "Prompt tokens among them that were found"),
    "prefix_hit_rate": (Gauge, "Share of looked-up prompt tokens that were found, 0 to 1"),
    "resumed_query_tokens": (Counter, "Tokens looked up on return from preemption"),
    "resumed_hit_tokens": (Counter, "Tokens among them that were found"),
    "mean_cached_prefix_tokens": (Gauge, "Prompt tokens found for each request that looked up"),
    "evicted_blocks": (Counter, "Cached blocks given up for others"),
    "blocks_free": (Gauge, "Blocks that nobody refers to"),
    "blocks_cached_idle": (Gauge, "Blocks that only the prefix cache refers to"),
    "blocks_in_use": (Gauge, "Blocks that a sequence holds"),
    "kv_bytes_cached_idle": (Gauge, "Bytes of KV in cached idle blocks"),
    "kv_bytes_in_use": (Gauge, "Bytes of KV in blocks in use"),
    "lookup_seconds": (Counter, "Seconds spent in looking up prefixes"),
    "publish_seconds": (Counter, "Seconds spent in publishing blocks"),
}


def print_table(stats: Stats, file: TextIO) -> None:
    """A table for a person: name, value, meaning."""
    columns = Column("name", no_wrap=True), Column("value", justify="right", no_wrap=True)
    table = Table(*columns, "what it says", title="Engine stats", title_justify="left")
    for name, value in stats.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        table.add_row(name, shown, MEANINGS[name][1])
    Console(file=file).print(table)


def print_prometheus(stats: Stats, file: TextIO) -> None:
    """Prometheus' text format: names are minivllm_..., those of counters end in _total."""

    class Collector:
        def collect(self) -> Iterator[Any]:
            for name, value in stats.items():
                kind, meaning = MEANINGS[name]
                yield kind(f"minivllm_{name}", meaning, value=value)

    # A registry of its own: the default one adds figures of the Python process.
    registry = CollectorRegistry()
    registry.register(Collector())
    print(generate_latest(registry).decode(), end="", file=file)


FORMATS = {"table": print_table, "prometheus": print_prometheus}
