"""The engine's stats for a person, and for a Prometheus server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Stats = Mapping[str, int | float]

# name -> (counter: only ever grows, or gauge: how it stands now; what it says)
MEANINGS = {
    "steps": ("counter", "Steps whose results were committed"),
    "num_waiting": ("gauge", "Sequences that wait"),
    "num_running": ("gauge", "Sequences that run"),
    "preemptions": ("counter", "Times a running sequence lost its blocks and waited again"),
    "prompt_tokens_computed": ("counter", "Prompt positions whose KV was computed"),
    "generated_tokens": ("counter", "Tokens generated"),
    "prefix_query_tokens": ("counter", "Prompt tokens looked up in the prefix cache"),
    "prefix_hit_tokens": ("counter", "Prompt tokens among them that were found"),
    "prefix_hit_rate": ("gauge", "Share of looked-up prompt tokens that were found, 0 to 1"),
    "resumed_query_tokens": ("counter", "Tokens looked up on return from preemption"),
    "resumed_hit_tokens": ("counter", "Tokens among them that were found"),
    "mean_cached_prefix_tokens": ("gauge", "Prompt tokens found for each request that looked up"),
    "evicted_blocks": ("counter", "Cached blocks given up for others"),
    "blocks_free": ("gauge", "Blocks that nobody refers to"),
    "blocks_cached_idle": ("gauge", "Blocks that only the prefix cache refers to"),
    "blocks_in_use": ("gauge", "Blocks that a sequence holds"),
    "kv_bytes_cached_idle": ("gauge", "Bytes of KV in cached idle blocks"),
    "kv_bytes_in_use": ("gauge", "Bytes of KV in blocks in use"),
    "lookup_seconds": ("counter", "Seconds spent in looking up prefixes"),
    "publish_seconds": ("counter", "Seconds spent in publishing blocks"),
}


def stats_table(stats: Stats) -> Table:
    """A rich table: name, value, meaning."""
    from rich.table import Table

    table = Table(title="Engine stats", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("what it says")
    for name, value in stats.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        table.add_row(name, shown, MEANINGS[name][1])
    return table


def prometheus_text(stats: Stats) -> str:
    """The stats in Prometheus' text format: names minivllm_..., counters end in _total."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}

    class Collector:
        def collect(self) -> Iterator[Any]:
            for name, value in stats.items():
                kind, meaning = MEANINGS[name]
                yield families[kind](f"minivllm_{name}", meaning, value=value)

    # A registry of its own: the default one adds figures of the Python process.
    registry = CollectorRegistry()
    registry.register(Collector())
    text: str = generate_latest(registry).decode()
    return text
