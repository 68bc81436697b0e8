"""Counters, always on: each one is an addition where the thing happens."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Metrics:
    """What has happened since the engine was made. Each field is defined by its line here.

    steps                   steps whose results were committed
    preemptions             times a running sequence lost its blocks and went back to waiting
    prompt_tokens_computed  prompt positions whose KV a committed step wrote; positions computed
                            again after a preemption count again
    generated_tokens        tokens chosen and appended, of requests that were aborted later too
    prefix_queries          requests that looked up their prefix, each once: at the first
                            admission of the first of its n outputs
    prefix_query_tokens     prompt tokens of those requests
    prefix_hit_tokens       prompt tokens among them found in the cache
    resumed_query_tokens    tokens looked up by sequences that came back from preemption
    resumed_hit_tokens      tokens among them found in the cache
    evicted_blocks          cached blocks given up to make room or to keep the cap on idle blocks;
                            a reset is not an eviction
    lookup_seconds          time spent in match()
    publish_seconds         time spent in publishing
    """

    steps: int = 0
    preemptions: int = 0
    prompt_tokens_computed: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    resumed_query_tokens: int = 0
    resumed_hit_tokens: int = 0
    evicted_blocks: int = 0
    lookup_seconds: float = 0.0
    publish_seconds: float = 0.0

    def as_dict(self) -> dict[str, int | float]:
        """The counters, and two figures made from them.

        prefix_hit_rate            share of looked-up prompt tokens that were found
        mean_cached_prefix_tokens  tokens found per request that looked up

        Both are 0 before the first lookup.
        """
        counters = asdict(self)
        num_queries = counters.pop("prefix_queries")
        return counters | {
            "prefix_hit_rate": self.prefix_hit_tokens / max(self.prefix_query_tokens, 1),
            "mean_cached_prefix_tokens": self.prefix_hit_tokens / max(num_queries, 1),
        }
