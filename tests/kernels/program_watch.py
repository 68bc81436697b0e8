"""The programs of a launch in Triton's interpreter: in any order, and none in another's way.

A GPU runs the programs of a grid in any order, many at once. The interpreter runs one after the
other in the grid's own order, which hides a program that needs what another one writes. Here each
grid is walked in an order drawn for its size, and every address is noted: none may be written by
one program and read or written by another.
"""

import itertools
import random

import numpy as np


class RaceError(AssertionError):
    """Two programs of one launch meet at an address that one of them writes."""


class ProgramWatch:
    """Watches every launch of this process from install() on."""

    def __init__(self):
        self._order = {}
        self._running = None
        self._reads, self._writes = {}, {}

    def install(self, patch):
        """Patch the interpreter; `patch` is a pytest.MonkeyPatch."""
        from triton.runtime import interpreter

        builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
        launch = executor.__call__
        set_grid_dim, set_grid_idx = builder.set_grid_dim, builder.set_grid_idx
        load, store = builder.create_masked_load, builder.create_masked_store

        def begin(*grid):
            set_grid_dim(*grid)
            self.begin(grid)

        def run(*place):
            self._running = self._order[place]
            set_grid_idx(*self._running)

        def noted_load(pointers, mask, *rest):
            self._note(self._reads, pointers, mask)
            return load(pointers, mask, *rest)

        def noted_store(pointers, value, mask, *rest):
            self._note(self._writes, pointers, mask)
            return store(pointers, value, mask, *rest)

        def checked_launch(executor, *arguments, **constants):
            launch(executor, *arguments, **constants)
            self.check()

        patch.setattr(builder, "set_grid_dim", begin)
        patch.setattr(builder, "set_grid_idx", run)
        patch.setattr(builder, "create_masked_load", noted_load)
        patch.setattr(builder, "create_masked_store", noted_store)
        patch.setattr(executor, "__call__", checked_launch)

    def begin(self, grid):
        """A launch: nothing is noted yet, and the order of its programs is drawn."""
        programs = list(itertools.product(*map(range, grid)))
        # By the size alone: a failing example fails again when it is repeated.
        drawn = random.Random(str(grid)).sample(programs, len(programs))
        self._order = dict(zip(programs, drawn, strict=True))
        self._reads, self._writes = {}, {}

    def _note(self, noted, pointers, mask):
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data]
        noted.setdefault(self._running, []).append(addresses)

    def check(self):
        """Raise RaceError if an address that one program wrote was another one's, too."""
        writes = {program: _distinct(parts) for program, parts in self._writes.items()}
        if not writes:
            return
        programs = list(writes)
        addresses = np.concatenate(list(writes.values()))
        writers = np.repeat(np.arange(len(programs)), [len(part) for part in writes.values()])
        order = np.argsort(addresses, kind="stable")
        addresses, writers = addresses[order], writers[order]
        twice = np.flatnonzero(addresses[1:] == addresses[:-1])
        if len(twice):
            first, second = (programs[writers[twice[0] + i]] for i in (0, 1))
            raise RaceError(f"the programs {first} and {second} write to one address")
        for program, parts in self._reads.items():
            read = _distinct(parts)
            found = np.minimum(np.searchsorted(addresses, read), len(addresses) - 1)
            for writer in writers[found[addresses[found] == read]]:
                if programs[writer] != program:
                    raise RaceError(f"program {program} reads what {programs[writer]} writes")


def _distinct(parts):
    return np.unique(np.concatenate(parts))
