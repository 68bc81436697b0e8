"""Prompts in, outputs out: the engine behind three methods.

Whoever calls LLM need not step the engine. Several calls may be open at the same time (two
streams side by side, a generate while a stream pauses): whichever steps, each gets its own.
"""

from collections import deque
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Sequence as ReadOnlySequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from minivllm.config import DEFAULT_MODEL, EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import InvalidRequestError, RunnerError
from minivllm.interrupts import interrupts_held
from minivllm.output import RequestOutput
from minivllm.sampling_params import SamplingParams

Prompt = str | Iterable[int]
Prompts = Prompt | Iterable[Prompt]
Outputs = Generator[RequestOutput]
Conversation = ReadOnlySequence[Mapping[str, str]]
_Checked = tuple[list[int], SamplingParams]
Params = SamplingParams | ReadOnlySequence[SamplingParams] | None

_BAR = "{n_fmt} tokens [{elapsed}, {rate_noinv_fmt}{postfix}]"


@dataclass(slots=True)
class _Inbox:
    """Where the outputs of one call's requests go.

    num_open   request id -> how many of its outputs have not finished; without those that have
    """

    outputs: deque[RequestOutput] = field(default_factory=deque)
    num_open: dict[str, int] = field(default_factory=dict)


class LLM:
    """A model and its engine.

    model    "smollm2-135m", a local Hugging Face folder, or a hub id
    engine   an engine that was made elsewhere, in place of model and config
    config   further fields of EngineConfig, by name

    engine         the LLMEngine. Requests may be added to it directly, too; they advance with
                   whatever call steps the engine
    other_outputs  the newest output of each such request, by (request id, index), for whoever
                   added it to take out. Leave stepping to LLM while one of its calls is open: an
                   output that somebody else's step() returns cannot reach it

    Raises ConfigError, DeviceError or ModelError.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, engine: LLMEngine | None = None, **config: Any
    ) -> None:
        self.engine = engine or LLMEngine(EngineConfig(model=model, **config))
        self.other_outputs: dict[tuple[str, int], RequestOutput] = {}
        self._numbers = count()
        self._inboxes: dict[str, _Inbox] = {}

    # What a person calls

    def generate(self, prompts: Prompts, params: Params = None) -> list[RequestOutput]:
        """Complete prompts, all in one engine; the finished outputs, in order.

        prompts  texts, taken as they are (no template), or lists of token ids; or one text
        params   for all prompts, or one for each; None is greedy with 64 tokens

        n outputs of a prompt stand together, in order of their index. Every prompt is checked
        before any is added: InvalidRequestError leaves the engine as it was. If anything else
        ends the call, Ctrl-C or a RunnerError, its requests are aborted and the engine can be
        used again.
        """
        # Imported late: a stream has no bar.
        from tqdm import tqdm

        requests = self._check(prompts, params)
        num_outputs = sum(each.n for _, each in requests)
        finished = []
        with (
            # disable=None: no bar where stderr is no terminal.
            tqdm(unit=" tokens", disable=None, bar_format=_BAR, miniters=1) as bar,
            # An exception in this loop's body would not end the generator by itself.
            closing(self._outputs(requests)) as outputs,
        ):
            for output in outputs:
                if output.finished:
                    finished.append(output)
                bar.set_postfix_str(f"{len(finished)}/{num_outputs} outputs", refresh=False)
                bar.update()
        return sorted(finished, key=lambda output: (int(output.request_id), output.index))

    def chat(
        self, conversations: Conversation | ReadOnlySequence[Conversation], params: Params = None
    ) -> list[RequestOutput]:
        """Give the assistant's next turn in each conversation; otherwise like generate.

        A conversation is a list of {"role": ..., "content": ...}, written out with the model's
        chat template. Continued turn by turn, it finds its own history in the prefix cache.
        """
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [cast("Conversation", conversations)]
        prompts = [self.encode_chat(cast("Conversation", each)) for each in conversations]
        return self.generate(prompts, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Outputs:
        """Complete one prompt; an output whenever one of its n sequences gains a token or ends.

        The prompt is checked at once, and its request joins the engine at the first next().
        Closing the iterator early aborts it.
        """
        return self._outputs([self._checked(prompt, params or SamplingParams())])

    def stream_all(self, prompts: Prompts, params: Params = None) -> Outputs:
        """Like stream, for prompts that run together; request ids are ascending numbers."""
        return self._outputs(self._check(prompts, params))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without a template."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(f"the prompt {text!r:.80} is not valid Unicode") from None
        return list(self._tokenizer.encode(text)) if text else []

    def encode_chat(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation, by the model's chat template."""
        if not conversation:
            raise InvalidRequestError("the conversation is empty; give at least one message")
        for message in conversation:
            is_message = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
            if not is_message or not all(isinstance(text, str) for text in message.values()):
                allowed = "{'role': text, 'content': text}"
                raise InvalidRequestError(f"message is {message!r:.80}; it must be {allowed}")
        return list(self._tokenizer.apply_chat_template(list(conversation)))

    # What the methods are made of

    @property
    def _tokenizer(self) -> Any:
        """The engine's; it can encode, too, while the engine needs no more than decode."""
        if self.engine.tokenizer is None:
            raise InvalidRequestError("the engine has no tokenizer; give prompts as token ids")
        return self.engine.tokenizer

    def _check(self, prompts: Prompts, params: Params) -> list[_Checked]:
        """Check every prompt with its params, or raise InvalidRequestError; adds nothing."""
        each_prompt = _as_prompts(prompts)
        each_params = _for_each(params, len(each_prompt))
        return [self._checked(*pair) for pair in zip(each_prompt, each_params, strict=True)]

    def _checked(self, prompt: Prompt, params: SamplingParams) -> _Checked:
        token_ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        return self.engine.check_request(token_ids, params), params

    def _outputs(self, requests: list[_Checked]) -> Generator[RequestOutput]:
        """Add the requests and give their outputs as they come; abort what is left at the end."""
        inbox = _Inbox()
        try:
            with interrupts_held():
                for token_ids, params in requests:
                    self._add(token_ids, params, inbox)
            while inbox.outputs or inbox.num_open:
                if inbox.outputs:
                    yield inbox.outputs.popleft()
                else:
                    self._step()
        finally:
            with interrupts_held():
                self._abandon(inbox)

    def _add(self, token_ids: list[int], params: SamplingParams, inbox: _Inbox) -> None:
        """Add a request under the next number that nobody else has taken as an id."""
        request_id = next(i for i in map(str, self._numbers) if not self.engine.is_live(i))
        self.engine.add_request(request_id, token_ids, params)
        self._inboxes[request_id] = inbox
        inbox.num_open[request_id] = params.n

    def _step(self) -> None:
        """Advance the engine by one step, and hand each output to whom it belongs."""
        if not self.engine.has_unfinished_requests():
            raise RunnerError("the engine was stepped by somebody else, who got the outputs")
        # An output that step() has returned stands nowhere else: Ctrl-C waits until it is filed.
        with interrupts_held():
            for output in self.engine.step():
                self._file(output)

    def _file(self, output: RequestOutput) -> None:
        request_id = output.request_id
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            self.other_outputs[request_id, output.index] = output
            return
        inbox.outputs.append(output)
        inbox.num_open[request_id] -= output.finished
        if inbox.num_open[request_id] == 0:
            del inbox.num_open[request_id], self._inboxes[request_id]

    def _abandon(self, inbox: _Inbox) -> None:
        """Abort the requests of a call that ends early, so that all their blocks are free again.

        What step() returns for them later is filed in the inbox, which nobody reads any more.
        """
        for request_id in list(inbox.num_open):
            if self.engine.is_live(request_id):
                self.engine.abort(request_id)
            else:  # somebody else's step() returned it
                del inbox.num_open[request_id], self._inboxes[request_id]
        stats = self.engine.stats()
        if inbox.num_open and stats["num_waiting"] == stats["num_running"] == 0:
            self._step()  # computes nothing: it only returns what was aborted


def _as_prompts(prompts: Prompts) -> list[Prompt]:
    """A single text is a list of one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequestError(f"prompts is {prompts!r:.80}; it must be texts or token ids")
    return cast("list[Prompt]", list(prompts))


def _for_each(params: Params, num_prompts: int) -> list[SamplingParams]:
    """Params for each prompt, in order."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        given = f"{len(params)} params for {num_prompts} prompts"
        raise InvalidRequestError(f"{given}; give one for all, or one for each")
    return list(params)
