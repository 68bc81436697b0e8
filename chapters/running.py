"""The engine that the chapters add up to, asked a question with the real model.

Torch and the model are loaded here, and by no other command.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from chapters.stages import StageImportError, Stages


class RunError(Exception):
    """No answer: the model is missing, or a reader's stage is not written or raises."""


def answers(
    files: Mapping[str, Path], prompts: Sequence[str] | None, through: int, max_tokens: int
) -> Iterator[str]:
    """What the engine says to each prompt, and how long it took, as it comes.

    `files` are the stages that do not come from the reference. Without prompts it is asked two
    questions that share their beginning. `through` is 5 or 7: the last chapter that the engine is
    made of. Raises RunError.
    """
    from chapters import engine
    from minivllm.errors import MiniVLLMError

    make = {5: engine.with_reference_attention, 7: engine.with_suffix_attention}[through]
    questions = prompts or engine.QUESTIONS
    try:
        for each in engine.ask(Stages(files), questions, make_engine=make, max_tokens=max_tokens):
            yield str(each)
    except (MiniVLLMError, StageImportError) as error:
        raise RunError(str(error)) from error
    except Exception as error:
        where = _place(error, files)
        if not where:
            raise
        raise RunError(f"{type(error).__name__} in {where}: {error}") from error


def _place(error: Exception, files: Mapping[str, Path]) -> str:
    """The last line of a reader's file that was running, or nothing."""
    names = {str(path) for path in files.values()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in names:
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return ""
