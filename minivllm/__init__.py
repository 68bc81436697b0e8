"""minivllm: a small vLLM, with a prefix cache that is proved right.

Public names are resolved when first used (PEP 562): importing the package, `minivllm.core` or
`minivllm.engine` needs neither torch nor anything else that takes seconds to load.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.config import EngineConfig
    from minivllm.engine import LLMEngine
    from minivllm.llm import LLM
    from minivllm.output import RequestOutput
    from minivllm.sampling_params import SamplingParams

__all__ = ["LLM", "EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams"]

_MODULE_OF = {
    "LLM": "minivllm.llm",
    "LLMEngine": "minivllm.engine",
    "EngineConfig": "minivllm.config",
    "RequestOutput": "minivllm.output",
    "SamplingParams": "minivllm.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import the module that defines `name`, on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
