"""What a caller gets back, step by step or at the end."""

from dataclasses import dataclass

from minivllm.core.batch import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One output of one request, as far as it has come.

    request_id          as given to add_request
    index               which of the request's n outputs
    token_ids           all tokens generated so far, with the stop token
    text                their text, without the stop token or stop string; never half a character
    finish_reason       "stop" | "length" | "abort" | "error"; None while running
    error               what went wrong, when finish_reason is "error"
    num_prompt_tokens   tokens of the prompt
    num_cached_tokens   prompt tokens whose KV was found in the prefix cache at first admission
    time_to_first_token seconds from add_request to the first token; None before it
    logprobs            one entry a generated token, if asked for
    prompt_logprobs     one entry a prompt token, None for the first, if asked for
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    error: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    time_to_first_token: float | None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        """True once no more tokens will come."""
        return self.finish_reason is not None
