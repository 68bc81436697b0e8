"""The command line: generate, demo, download, explain.

Whatever a person can get wrong ends as one line on stderr and exit code 2. Ctrl-C ends with 130,
a reader that has gone away (`| head`) with 141, as they do for other programs, and silently.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any, NoReturn, TextIO

from minivllm.config import DEFAULT_MODEL, EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import InvalidRequestError, MiniVLLMError
from minivllm.explain import explain
from minivllm.llm import LLM
from minivllm.output import RequestOutput
from minivllm.sampling_params import SamplingParams

OK, REFUSED, INTERRUPTED, PIPE_CLOSED = 0, 2, 130, 141

# Named like the fields of SamplingParams and EngineConfig, which check the values.
_OPTIONS: list[tuple[str, type, str]] = [
    ("max-tokens", int, "generate at most so many tokens (64)"),
    ("temperature", float, "0 is greedy (0)"),
    ("top-k", int, "keep the k most likely tokens; 0 is off (0)"),
    ("top-p", float, "keep the smallest set of tokens that reaches this probability (1)"),
    ("min-p", float, "drop tokens below this share of the best one's probability (0)"),
    ("repetition-penalty", float, "above 1 makes tokens seen before less likely (1)"),
    ("seed", int, "draw the same tokens again next time (drawn anew)"),
    ("n", int, "so many outputs of each prompt (1)"),
    ("logprobs", int, "with --json: log-probabilities of so many best tokens (none)"),
    ("model", str, f"a name, a Hugging Face folder or a hub id ({DEFAULT_MODEL})"),
    ("device", str, "auto, cpu or cuda (auto)"),
    ("dtype", str, "auto, float32, bfloat16 or float16 (auto)"),
    ("block-size", int, "tokens in a KV block (16)"),
    ("num-kv-blocks", int, "blocks in the pool (as many as fit into 1 GiB, or into a GPU)"),
    ("max-num-batched-tokens", int, "tokens computed in one step (2048)"),
    ("max-model-len", int, "prompt and output together (what the model was trained for)"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show an emoji
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options) or OK
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at its end, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (MiniVLLMError, OSError) as error:
        return _refuse(str(error))
    return code


def _refuse(message: str) -> int:
    """One line on stderr, whatever the message."""
    print("minivllm: error:", " ".join(message.split()), file=sys.stderr)
    return REFUSED


class _Parser(argparse.ArgumentParser):
    """Errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        sys.exit(_refuse(f"{message} (see {self.prog} --help)"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="minivllm", description="A small vLLM.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="generate | demo | download | explain")

    def command(name: str, run: Callable[..., int | None], meaning: str) -> _Parser:
        added = commands.add_parser(name, help=meaning, description=meaning, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    _add_generate_options(command("generate", _generate, "complete prompts"))
    command("demo", _demo, "watch six people share one system prompt")
    command("download", _download, "fetch the default model, if it is missing")
    told = command("explain", _explain, "say why a request found no more in the cache")
    told.add_argument("--trace", metavar="FILE", type=Path, required=True)
    told.add_argument("--request", metavar="ID", required=True, help="0 is the first prompt")
    return parser


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("--prompt", metavar="TEXT", action="append", required=True, help="may be repeated")
    add("--chat", action="store_true", help="each prompt is a user's message to an assistant")
    for name, kind, meaning in _OPTIONS:
        metavar = {int: "N", float: "X", str: "NAME"}[kind]
        add(f"--{name}", metavar=metavar, type=kind, help=meaning)
    add("--stop", metavar="TEXT", action="append", help="end before this text; may be repeated")
    add("--ignore-eos", action="store_true", default=None, help="go on after the model's end")
    off = {"dest": "enable_prefix_caching", "action": "store_false", "default": None}
    add("--no-prefix-cache", **off, help="compute every prefix anew")
    add("--trace", metavar="FILE", type=Path, help="write what the engine decides, event by event")
    add("--json", action="store_true", help="print one JSON object: outputs and stats")
    stats = {"nargs": "?", "const": "table", "choices": ("table", "prometheus")}
    add("--stats", **stats, help="print the engine's counters at the end (with --json: on stderr)")


# The commands


def _generate(options: argparse.Namespace) -> int:
    # What can be refused without the model is refused before it is loaded.
    params = SamplingParams(**_given(options, SamplingParams))
    config = EngineConfig(**_given(options, EngineConfig))
    if "" in options.prompt:
        raise InvalidRequestError("a prompt is empty; give at least one character")
    with _open_trace(options.trace) as trace:
        write = None if trace is None else lambda line: print(line, file=trace)
        llm = LLM(engine=LLMEngine(config, write_trace_line=write))
        if options.chat:
            prompts = [llm.encode_chat([{"role": "user", "content": t}]) for t in options.prompt]
        else:
            prompts = [llm.encode(text) for text in options.prompt]
        if options.json:
            outputs = llm.generate(prompts, params)
            print(json.dumps({"outputs": list(map(_row, outputs)), "stats": llm.engine.stats()}))
        else:
            outputs = _stream(llm, prompts, params)
    if options.stats:
        # Imported late: rich and prometheus_client are not needed for an answer.
        from minivllm import stats_report

        print_stats = stats_report.FORMATS[options.stats]
        print_stats(llm.engine.stats(), sys.stderr if options.json else sys.stdout)
    errors = [output for output in outputs if output.error]
    for output in errors:
        _refuse(f"prompt {output.request_id}: {output.error}")
    return REFUSED if errors else OK


def _given(options: argparse.Namespace, of: type[Any]) -> dict[str, Any]:
    """The options that were given, among the fields of a dataclass: it has its own defaults."""
    values = {field.name: getattr(options, field.name, None) for field in fields(of)}
    return {name: value for name, value in values.items() if value is not None}


def _open_trace(path: Path | None) -> AbstractContextManager[TextIO | None]:
    """The trace file, emptied and open for writing; nothing without a path."""
    try:
        return nullcontext() if path is None else path.open("w", encoding="utf-8")
    except OSError as error:
        raise MiniVLLMError(f"cannot write the trace to {path}: {error.strerror}") from error


def _row(output: RequestOutput) -> dict[str, Any]:
    """All of an output but what it shares with the engine."""
    own = {name: value for name, value in asdict(output).items() if "known_" not in name}
    return own | {"token_ids": output.token_ids, "logprobs": output.logprobs}


def _stream(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """Print each text as it comes, in order, under a label if there are several."""
    newest: dict[tuple[int, int], RequestOutput] = {}
    places = list(product(range(len(prompts)), range(params.n)))
    # Closed here also by Ctrl-C while it prints: what it aborts belongs in the open trace.
    with closing(llm.stream_all(prompts, params)) as stream:
        for place in places:
            if len(places) > 1:
                label = f"prompt {place[0]}" + (f", output {place[1]}" if params.n > 1 else "")
                print(("\n" if newest else "") + f"[{label}]")
            num_shown = 0
            while place not in newest or not newest[place].finished:
                output = next(stream)
                newest[int(output.request_id), output.index] = output
                if place in newest:
                    print(newest[place].text[num_shown:], end="", flush=True)
                    num_shown = len(newest[place].text)
            print(newest[place].text[num_shown:], flush=True)
    return [newest[place] for place in places]


def _demo(options: argparse.Namespace) -> int:
    from minivllm.demo import run_demo

    return run_demo()


def _download(options: argparse.Namespace) -> None:
    from minivllm.model.download import ensure_default_model

    print(ensure_default_model())


def _explain(options: argparse.Namespace) -> None:
    print(explain(options.trace, options.request))
