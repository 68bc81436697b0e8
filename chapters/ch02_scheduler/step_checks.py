"""What must hold after every step of a scheduler, and for every output. Each raises Broken."""

from typing import Any

from chapters.ch02_scheduler.fake_engine import Taken, alone, names
from chapters.testing import Broken


def expect_each_once(scheduler: Any, sequences: list[Any]) -> None:
    """I10: each request stands in exactly one list."""
    lists = {name: getattr(scheduler, name) for name in ("waiting", "running", "finished")}
    for sequence in sequences:
        places = [name for name, members in lists.items() for each in members if each is sequence]
        if len(places) != 1 or sequence.state.value != places[0]:
            state = sequence.state.name
            raise Broken("I10", f"{sequence.request_id} is {state}, and stands in {places}")


def expect_progress(scheduler: Any, taken: Taken) -> None:
    """I11: the step computed something or ended something."""
    if not taken.step.decodes + taken.step.prefills and not taken.num_ended:
        pool = scheduler.pool
        raise Broken(
            "I11",
            f"{names(taken.waiting)} waited, {names(taken.decoding)} ran, {pool.num_free} of"
            f" {pool.num_blocks} blocks are free, and a step computed nothing and ended nothing",
        )


def expect_tokens_or_preemption(taken: Taken) -> None:
    """I12: who was decoding has one token more, or waits again, or has outgrown the pool."""
    for sequence, num_tokens in taken.decoding.items():
        gained = sequence.num_tokens - num_tokens
        gave_way = sequence.state.name == "WAITING" or sequence.finish_reason == "error"
        if gained != (0 if gave_way else 1):
            raise Broken(
                "I12",
                f"{sequence.request_id} was decoding, is {sequence.state.name} now, and gained"
                f" {gained} tokens",
            )


def expect_blocks_add_up(scheduler: Any, sequences: list[Any]) -> None:
    """I1 and I5: tables are as long as what is computed, and they are all that is not free."""
    pool = scheduler.pool
    for sequence in sequences:
        held, computed = len(sequence.block_table), sequence.num_computed_tokens
        needed = -(-computed // pool.block_size) if sequence.state.name == "RUNNING" else 0
        if held != needed:
            raise Broken(
                "I5",
                f"{sequence.request_id} is {sequence.state.name} with {computed} positions computed"
                f" in blocks of {pool.block_size}, and its table has {held} blocks, not {needed}",
            )
    in_tables = sum(len(sequence.block_table) for sequence in sequences)
    if pool.num_free + in_tables != pool.num_blocks:
        raise Broken(
            "I1", f"{pool.num_free} blocks are free and {in_tables} in tables, of {pool.num_blocks}"
        )


def expect_output_as_if_alone(scheduler: Any, sequence: Any) -> None:
    """C2.18: who was not aborted has the output that it would have had alone."""
    if sequence.finish_reason == "abort":
        return
    holds = scheduler.pool.num_blocks * scheduler.pool.block_size
    expected = alone(sequence, holds, scheduler.max_model_len)
    got = (sequence.token_ids, sequence.finish_reason)
    if got != expected:
        what = f"{sequence.request_id}, a prompt of {sequence.num_prompt_tokens} tokens"
        raise Broken("C2.18", f"{what}: alone it is {expected}, among others {got}")


def expect_limits(scheduler: Any, taken: Taken) -> None:
    """The step kept to the budget, and to the seats."""
    budget, seats = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    decodes, prefills = taken.step
    if taken.num_charged > budget:
        what = f"decodes {names(decodes)}, prefills {names(prefills)}"
        raise Broken("C2.2", f"{what}: {taken.num_charged} tokens, budget {budget}")
    if len(decodes) + len(prefills) > seats:
        raise Broken("C2.3", f"{names(decodes + prefills)} in {seats} seats")


def expect_order(scheduler: Any, taken: Taken) -> None:
    """Nobody was overtaken, the newest gave way, and nobody was admitted in their stead."""
    decodes, prefills = taken.step
    preempted = [each for each in taken.decoding if each.state.name == "WAITING"]
    if preempted and prefills:
        what = f"{names(preempted)} gave way and {names(prefills)} was admitted"
        raise Broken("C2.16", f"in one step {what}")
    for victim in preempted:
        if any(each.arrival > victim.arrival for each in decodes):
            what = f"{victim.request_id} gave way, and a newer one did not"
            raise Broken("C2.14", f"{what}: decodes are {names(decodes)}")
    order = [sequence.arrival for sequence in scheduler.running + scheduler.waiting]
    if order != sorted(order):
        what = f"{names(scheduler.running)} run, {names(scheduler.waiting)} wait"
        raise Broken("C2.1", f"somebody was overtaken: {what}")
