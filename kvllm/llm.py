"""LLM: the offline batch API. Reads like vLLM's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from itertools import count
from numbers import Integral
from typing import Any, Concatenate, ParamSpec

from tqdm import tqdm

from kvllm.beam_search import BeamSearch, begin_search
from kvllm.core.input_processor import Array, Prompt
from kvllm.engine_args import EngineArgs
from kvllm.engine_builder import build_engine, cache_shape
from kvllm.errors import RequestError
from kvllm.outputs import RequestOutput
from kvllm.sampling_params import BeamSearchParams, SamplingParams
from kvllm.stats import EngineStats
from kvllm.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

P = ParamSpec("P")


def _with_options_of(args: Callable[P, Any]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the parameters and the docstring of `args`, for type checkers, editors and `help`."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        init.__doc__ = args.__doc__
        init.__signature__ = signature(args.__init__)  # type: ignore[attr-defined]
        return init

    return decorate


class LLM:
    """A model with its KV pool, for batches of prompts.

    Its options are those of `kvllm.engine_args.EngineArgs`, which describes each of them: the directory of a checkpoint
    first, all others by keyword.

    Raises:
        ConfigError, CheckpointError: before any weights are read, wherever that can be known.
    """

    @_with_options_of(EngineArgs)
    def __init__(self, *args: Any, **options: Any) -> None:
        engine_args = EngineArgs(*args, **options)
        self.model_config = engine_args.model_config
        self.cache_shape = cache_shape(engine_args)
        self.llm_engine = build_engine(engine_args)
        self.config = self.llm_engine.config
        self.tokenizer = self.llm_engine.inputs.tokenizer
        self._request_ids = count()
        self._in_flight: list[str] = []  # requests of the call of `generate` that is under way, or was cut short

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, as many at a time as the KV pool carries.

        Args:
            prompts: a prompt, or an iterable of prompts. A prompt is text, token ids (a list, or a one-dimensional
                array or tensor of integers), or a dict with `prompt` or `prompt_token_ids`. A list of integers is one
                prompt, and so is a one-dimensional array of them; each line of a two-dimensional one is a prompt.
            sampling_params: for all prompts, or an iterable with one for each. Default: `SamplingParams()`.
            use_tqdm: show a progress bar.

        Returns:
            One output for each prompt, in order. Of several prompts, one that cannot be served has its `error` set; the
            others are not affected.

        Raises:
            RequestError: a single prompt cannot be served, or the arguments do not fit together.
        """
        return self._generate(*_batch_of(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Iterable[Any],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations through the checkpoint's chat template.

        Args:
            messages: a conversation, which is a list of messages `{"role": ..., "content": ...}`, or an iterable of
                conversations.
            sampling_params: as in `generate`.
            use_tqdm: show a progress bar.
            chat_template_kwargs: passed to the template, e.g. `{"enable_thinking": False}`.

        Returns:
            One output for each conversation. Of several, one that the template cannot render, or that cannot be served,
            has its `error` set; the others are not affected.

        Raises:
            RequestError: a single conversation cannot be served, or the arguments do not fit together.
        """
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer, so it has no chat template: use generate")
        conversations, alone = _conversations_of(messages)
        options = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        prompts = [self._render(self.tokenizer, conversation, options) for conversation in conversations]
        return self._generate(prompts, alone, sampling_params, use_tqdm)

    def beam_search(self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """Find the likeliest continuations of prompts.

        Args:
            prompts: as in `generate`.

        Returns:
            One output for each prompt, in order, with up to `beam_width` completions, the best one first. Of several
            prompts, one that cannot be served has its `error` set. No KV pair is dropped, whatever the engine's
            compression is, as each step computes the beams that it needs from cached blocks.

        Raises:
            RequestError: a single prompt cannot be served.
        """
        batch, alone = _batch_of(prompts)
        outputs: list[RequestOutput] = []
        searches: list[tuple[RequestOutput, BeamSearch]] = []
        for prompt in batch:
            output = RequestOutput(str(next(self._request_ids)), None, [], [], finished=True)
            outputs.append(output)
            try:
                output.prompt, search = begin_search(self.llm_engine, prompt, params)
            except RequestError as error:
                output.error = error
            else:
                output.prompt_token_ids = search.prompt_token_ids
                searches.append((output, search))
        while running := [each for each in searches if not each[1].is_done and each[0].error is None]:
            self._advance(running)
        for output, search in searches:
            if output.error is None:
                output.outputs = search.completions(self.tokenizer)
        if alone and (error := outputs[0].error):
            raise error
        return outputs

    def _advance(self, searches: list[tuple[RequestOutput, BeamSearch]]) -> None:
        """Compute the next token of all beams of some searches together."""
        prompts = [(search, prompt) for _, search in searches for prompt in search.prompts()]
        params = [search.sampling_params() for search, _ in prompts]
        found = iter(self._generate([prompt for _, prompt in prompts], False, params, False))
        for output, search in searches:
            of_search = [next(found) for _ in search.beams]
            output.error = next((each.error for each in of_search if each.error), None)
            if output.error is None:
                search.advance([(each.outputs[0].logprobs or [])[0] for each in of_search])

    def stats(self) -> EngineStats:
        """Counters since the engine started. The object is live: it goes on counting."""
        return self.llm_engine.stats

    def _generate(
        self,
        prompts: list[Any],
        alone: bool,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """prompts: a RequestError stands for what could not be made a prompt. alone: errors are raised."""
        params = _one_for_each(sampling_params, len(prompts))
        self._abort_in_flight()  # an interrupt may have cut short an earlier call, and its own abortion
        if self.llm_engine.has_unfinished_requests():
            raise RequestError("llm_engine has unfinished requests: call llm_engine.step() until they have ended")
        self._in_flight = request_ids = [str(next(self._request_ids)) for _ in prompts]
        try:
            outputs = [self._add(*each, alone) for each in zip(request_ids, prompts, params, strict=True)]
            self._run(outputs, use_tqdm)
        finally:
            self._abort_in_flight()
        if alone and (error := outputs[0].error):
            raise error
        return outputs

    def _abort_in_flight(self) -> None:
        """Abort what an exception has left unfinished."""
        if self.llm_engine.has_unfinished_requests():
            for request_id in self._in_flight:
                self.llm_engine.abort(request_id)
        self._in_flight = []

    def _render(self, tokenizer: Tokenizer, messages: Any, options: dict[str, Any]) -> Prompt | RequestError:
        """The prompt of a conversation."""
        try:
            text = tokenizer.apply_chat_template(messages, **options)
            # The template has written the special tokens already.
            return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
        except RequestError as error:
            return error

    def _add(self, request_id: str, prompt: Any, sampling_params: SamplingParams, alone: bool) -> RequestOutput:
        try:
            if isinstance(prompt, RequestError):
                raise prompt
            return self.llm_engine.add_request(request_id, prompt, sampling_params, stream=False)
        except RequestError as error:
            if alone:
                raise
            logger.warning("request %s is refused: %s", request_id, error)
            text = prompt if isinstance(prompt, str) else None
            return RequestOutput(request_id, text, [], [], finished=True, error=error)

    def _run(self, outputs: list[RequestOutput], use_tqdm: bool) -> None:
        refused = sum(output.finished for output in outputs)
        with tqdm(total=len(outputs), initial=refused, desc="Processed prompts", disable=not use_tqdm) as bar:
            prompt_tokens, output_before = 0, self.stats().output_tokens
            begin = time.perf_counter()
            while self.llm_engine.has_unfinished_requests():
                finished = [output for output in self.llm_engine.step() if output.finished]
                prompt_tokens += sum(len(output.prompt_token_ids) for output in finished)
                bar.update(len(finished))
                if use_tqdm:
                    output_tokens = self.stats().output_tokens - output_before
                    self._describe(bar, prompt_tokens, output_tokens, time.perf_counter() - begin)

    def _describe(self, bar: tqdm, prompt_tokens: int, output_tokens: int, seconds: float) -> None:
        stats = self.stats()
        running, blocks = next(iter(stats.timeline_since(stats.steps - 1)), (0, 0))
        bar.set_postfix_str(
            f"input {prompt_tokens / seconds:.0f} tok/s, output {output_tokens / seconds:.0f} tok/s, "
            f"running {running}, KV pool {blocks / stats.num_blocks:.0%}",
            refresh=False,
        )


def _batch_of(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it was a single prompt. An iterator is read once, to its end."""
    if isinstance(prompts, str | bytes | bytearray | Mapping):
        return [prompts], True
    if isinstance(prompts, Array):
        prompts = prompts.tolist()
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts={prompts!r} is not allowed: give a prompt (text or token ids) or a list of them")
    batch = list(prompts)
    if batch and all(isinstance(item, Integral) and not isinstance(item, bool) for item in batch):
        return [batch], True
    return batch, False


def _conversations_of(messages: Any) -> tuple[list[Any], bool]:
    """Conversations as a list, and whether it was a single one. A list without lists is one conversation."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        return [messages], True
    found = list(messages)
    return (found, False) if any(isinstance(each, list | tuple) for each in found) else ([found], True)


def _one_for_each(params: Any, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if isinstance(params, Mapping) or not isinstance(params, Iterable):
        raise RequestError(f"sampling_params are of type SamplingParams, {params!r} is not")
    params = list(params)
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} sampling_params for {num_prompts} prompts: give one for all or one for each")
    for each in params:
        if not isinstance(each, SamplingParams):
            raise RequestError(f"sampling_params are of type SamplingParams, {each!r} is not")
    return params
