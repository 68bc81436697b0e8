"""A list that counts how many of its entries are touched: O(1) or O(n), without a clock."""

from collections.abc import Iterator
from typing import Any


class CountingList(list[Any]):
    """A list; `touched` is the number of entries looked at or moved so far.

    What Python does to the end of a list touches one entry. What it does elsewhere, or to the
    whole list, touches all that have to be looked at or moved.
    """

    touched = 0

    def __getitem__(self, index: Any) -> Any:
        result = super().__getitem__(index)
        self.touched += len(result) if isinstance(index, slice) else 1
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        self.touched += len(self) if isinstance(index, slice) else 1
        super().__setitem__(index, value)

    def __delitem__(self, index: Any) -> None:
        self.touched += len(self) if isinstance(index, slice) else self._behind(index)
        super().__delitem__(index)

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            self.touched += 1
            yield value

    def __reversed__(self) -> Iterator[Any]:
        for value in super().__reversed__():
            self.touched += 1
            yield value

    def __contains__(self, value: object) -> bool:
        self.touched += len(self)
        return super().__contains__(value)

    def append(self, value: Any) -> None:
        """Touches the new entry."""
        self.touched += 1
        super().append(value)

    def pop(self, index: Any = -1) -> Any:
        """Touches the entry and those behind it."""
        self.touched += self._behind(index)
        return super().pop(index)

    def insert(self, index: Any, value: Any) -> None:
        """Touches the new entry and those behind it."""
        self.touched += 1 + len(self[index:])
        super().insert(index, value)

    def remove(self, value: Any) -> None:
        """Looks at or moves every entry."""
        self.touched += len(self)
        super().remove(value)

    def index(self, *arguments: Any) -> int:
        """May look at every entry."""
        self.touched += len(self)
        return super().index(*arguments)

    def count(self, value: Any) -> int:
        """Looks at every entry."""
        self.touched += len(self)
        return super().count(value)

    def sort(self, **options: Any) -> None:
        """Touches every entry."""
        self.touched += len(self)
        super().sort(**options)

    def reverse(self) -> None:
        """Touches every entry."""
        self.touched += len(self)
        super().reverse()

    def _behind(self, index: int) -> int:
        """The entry at `index`, and those that move up when it goes."""
        return len(self) - index if index >= 0 else -index
