"""The one error of this folder."""


class KernelInputError(ValueError):
    """A kernel was asked to work on inputs it would misread: nothing was launched.

    A GPU follows a wrong block id without a word, so every launcher and `PagedBatch` check
    first. The message says which input, its value, and what would have been right.
    """
