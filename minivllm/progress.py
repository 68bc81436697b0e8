"""How far a batch of prompts has come, for a person who watches."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minivllm.output import RequestOutput

_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} outputs [{elapsed}{postfix}]"


@contextmanager
def progress_bar(num_outputs: int) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar of finished outputs with tokens per second, on stderr if that is a terminal.

    Gives a function that takes each output as it grows; it does nothing without a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda output: None
        return
    # Imported late: most programs never show a bar.
    from tqdm import tqdm

    started = time.perf_counter()
    num_tokens = 0
    # miniters=0: redraw by time, also while no output ends.
    with tqdm(total=num_outputs, bar_format=_BAR, miniters=0, dynamic_ncols=True) as bar:

        def show(output: RequestOutput) -> None:
            nonlocal num_tokens
            num_tokens += output.finish_reason not in ("abort", "error")
            rate = num_tokens / (time.perf_counter() - started)
            bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
            bar.update(int(output.finished))

        yield show
