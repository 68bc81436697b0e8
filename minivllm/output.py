"""What a caller gets back, step by step or at the end."""

from dataclasses import dataclass, field

from minivllm.core.batch import TokenLogprobs


# Not frozen: each step makes one a sequence, and a frozen one is filled by a call a field.
@dataclass(slots=True, eq=False)
class RequestOutput:
    """One output of one request, as far as it has come.

    request_id          as given to add_request
    index               which of the request's n outputs
    text                text of `token_ids`, without stop token or stop string; no half character
    finish_reason       "stop" | "length" | "abort" | "error"; None while running
    error               what went wrong, when finish_reason is "error"
    num_prompt_tokens   tokens of the prompt
    num_tokens          tokens of the prompt and of this output
    num_cached_tokens   prompt tokens whose KV was found in the prefix cache at first admission
    time_to_first_token seconds from add_request to the first token; None before it
    known_token_ids     the engine's own list of these tokens; it may have grown longer by now
    known_logprobs      the same of log-probabilities, if asked for
    prompt_logprobs     one entry a prompt token, if asked for; None for the first, and for what
                        an aborted request did not come to. One list for all of its outputs
    """

    request_id: str
    index: int
    text: str
    finish_reason: str | None
    error: str | None
    num_prompt_tokens: int
    num_tokens: int
    num_cached_tokens: int
    time_to_first_token: float | None
    known_token_ids: list[int] = field(repr=False)
    known_logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def token_ids(self) -> list[int]:
        """All tokens generated so far, with the stop token, in a list of its own.

        Copied when it is read. Copied in each step, n tokens would cost n * n / 2 copies.
        """
        return self.known_token_ids[self.num_prompt_tokens : self.num_tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One entry a generated token, if asked for; copied like `token_ids`."""
        known = self.known_logprobs
        return None if known is None else known[: self.num_tokens - self.num_prompt_tokens]

    @property
    def finished(self) -> bool:
        """True once no more tokens will come."""
        return self.finish_reason is not None
