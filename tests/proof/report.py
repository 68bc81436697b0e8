"""What a person needs of a failing workload: the shortest way there, and the pool at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.proof.oracle import CORRUPT, promise_of
from tests.proof.picture import picture
from tests.proof.play import Done, Player
from tests.proof.workloads import Operation, Workload

MAX_TRIES = 600


def failure_of(workload: Workload) -> tuple[Player, BaseException | None]:
    """Play a workload; the player at its end or at its failure, and the failure."""
    player = Player(workload)
    try:
        player.run()
    except (Exception, KeyboardInterrupt) as error:
        # A KeyboardInterrupt may be a workload's own that came through where it must not.
        return player, error
    return player, None


def shrink(
    operations: tuple[Operation, ...], still_fails: Callable[[tuple[Operation, ...]], bool]
) -> tuple[Operation, ...]:
    """Leave out operations, many at a time and then one by one, while `still_fails` holds.

    Delta debugging (Zeller and Hildebrandt 2002), in its simple form.
    """
    size, num_tries = max(1, len(operations) // 2), 0
    while num_tries < MAX_TRIES:
        before = len(operations)
        start = 0
        while start < len(operations) and num_tries < MAX_TRIES:
            shorter = operations[:start] + operations[start + size :]
            num_tries += 1
            if still_fails(shorter):
                operations = shorter
            else:
                start += size
        if size == 1 and len(operations) == before:
            break
        size = max(1, size // 2)
    return operations


def report(workload: Workload) -> str | None:
    """Shrink a failing workload, and tell its story; None if it does not fail."""
    _, error = failure_of(workload)
    if error is None:
        return None
    promise = promise_of(error)

    def still_fails(operations: tuple[Operation, ...]) -> bool:
        _, found = failure_of(replace(workload, operations=operations))
        return found is not None and promise_of(found) == promise

    short = replace(workload, operations=shrink(workload.operations, still_fails))
    player, error = failure_of(short)
    message = f"{type(error).__name__}: {error}" if promise not in str(error) else str(error)
    hash_name, num_left = workload.setup.hash_name, len(short.operations)
    return "\n".join(
        [
            f"workload {workload.seed} fails",
            f"  {message}",
            f"  shortest way there, {num_left} of {len(workload.operations)} operations",
            f"    {workload.setup}",
            *_story(player),
            picture(
                player.engine.kv,
                [*player.engine.scheduler.waiting, *player.engine.scheduler.running],
                lambda block: _content(player, block),
                message,
            ),
            f"  again  python -m tests.proof --replay {workload.seed} --hash {hash_name!r}",
        ]
    )


def _story(player: Player) -> list[str]:
    """What was done, numbered, with what the runner computed."""
    ends = [done.num_batches for done in player.log[1:]] + [len(player.runner.batches)]
    return [
        f"  {number:>4}  {_told(done)}{_computed(player, done.num_batches, end)}"
        for number, (done, end) in enumerate(zip(player.log, ends, strict=True), 1)
    ]


def _told(done: Done) -> str:
    detail = done.detail
    if isinstance(detail, list):
        detail = f"prompt {' '.join(map(str, detail))}"
    return f"{done.operation}   {detail}".rstrip()


def _computed(player: Player, first: int, end: int) -> str:
    shares = [
        f"{request_id}{f'#{index}' if index else ''} [{start}, {stop}) in {list(table)}"
        for batch in player.runner.batches[first:end]
        for request_id, index, start, stop, table in batch
    ]
    return "   " + ", ".join(shares) if shares else ""


def _content(player: Player, block: int) -> str:
    """The last token of each slot's context; who wants all of it finds it in the message."""
    contexts = player.runner.contexts
    words = [
        "." if node is None else "x" if node == CORRUPT else str(contexts.tokens(node)[-1])
        for node in player.runner.blocks[block]
    ]
    return f"[{' '.join(words)}]"
