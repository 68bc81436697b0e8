"""Small engines without a model, for tests of what the engine decides.

The runner is the content oracle of the proof (tests/proof/oracle.py): a wrong block raises, and
what any right engine must generate is known beforehand.
"""

from minivllm import EngineConfig, LLMEngine, SamplingParams
from tests.proof.oracle import HistoryRunner, greedy

__all__ = ["HistoryRunner", "greedy", "make_engine", "params", "run"]


def make_engine(runner=None, tokenizer=None, write_trace_line=None, **config):
    """An engine with small sizes and every check on."""
    settings = {"block_size": 4, "num_kv_blocks": 16, "debug_checks": True} | config
    runner = runner or HistoryRunner()
    engine = LLMEngine(
        EngineConfig(**settings), runner, tokenizer, write_trace_line=write_trace_line
    )
    runner.is_published = lambda block: engine.kv.cache.at(block) is not None
    return engine


def run(engine):
    """Step until nothing is left; return the finished outputs by (request id, index)."""
    finished = {}
    for _ in range(10_000):
        if not engine.has_unfinished_requests():
            return finished
        for output in engine.step():
            if output.finished:
                assert (output.request_id, output.index) not in finished
                finished[output.request_id, output.index] = output
    raise AssertionError("I11: no end after 10,000 steps")


def params(max_tokens=4, **values):
    """Greedy by default."""
    return SamplingParams(max_tokens=max_tokens, **values)
