"""Every error a user of minivllm can meet, by name.

One root, so that a program can catch all of them with one `except`. Messages say the value,
the limit, and what would fit.
"""


class MiniVLLMError(Exception):
    """Root of all errors that minivllm raises on purpose."""


class ConfigError(MiniVLLMError, ValueError):
    """An EngineConfig value, or two of them together, cannot work."""


class DeviceError(MiniVLLMError, RuntimeError):
    """The device asked for is not on this machine."""


class ModelError(MiniVLLMError, ValueError):
    """A model could not be found or read: no such folder, a missing or broken file."""


class UnsupportedModelError(ModelError):
    """The model was read, but it asks for something this engine does not compute."""


class InvalidRequestError(MiniVLLMError, ValueError):
    """A prompt or a sampling parameter is out of range. The engine is unchanged."""


class DuplicateRequestError(InvalidRequestError):
    """A request with this id has not been returned yet."""


class UnknownRequestError(MiniVLLMError, LookupError):
    """No live request has this id."""


class EngineBusyError(MiniVLLMError, RuntimeError):
    """The call needs an engine without live requests, or came from within another call of it.

    Nothing was changed.
    """


class TraceError(MiniVLLMError):
    """A trace cannot be read, or does not tell of the request asked for."""


class RunnerError(MiniVLLMError, RuntimeError):
    """The runner failed, or a step could make no progress (I11).

    The step is undone: nothing of it is published, tables are cut back to what was computed,
    and the next `step()` tries again.
    """


class BlockError(MiniVLLMError, RuntimeError):
    """A block was used against the rules of the pool, for example released twice (I2)."""


class ReadOnlyBlockError(BlockError):
    """A slot of a published block was about to be written (I3)."""
