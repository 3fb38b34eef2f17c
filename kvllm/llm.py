"""LLM: the offline batch API. Reads like vLLM's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from inspect import signature
from itertools import count
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from tqdm import tqdm

from kvllm.beam_search import BeamSearch, begin_search
from kvllm.chat_messages import render_chat
from kvllm.control_tokens import encode_marked, unmark
from kvllm.core.input_processor import check_sampling
from kvllm.core.shared_engine import SharedEngine
from kvllm.engine_args import EngineArgs
from kvllm.engine_builder import build_engine, cache_shape
from kvllm.errors import RequestError
from kvllm.lora.request import Adapter, LoRARequest
from kvllm.metrics import Metric, metrics_of
from kvllm.outputs import BeamSearchOutput, RequestOutput
from kvllm.pooling.engine import PoolingEngine, wrong_runner
from kvllm.pooling.methods import PoolingMethods
from kvllm.prompts import Prompt, batch_of, one_for_each
from kvllm.sampling_params import BeamSearchParams, SamplingParams
from kvllm.stats import EngineStats
from kvllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvllm.engine_builder import Engine

logger = logging.getLogger(__name__)

P = ParamSpec("P")


def _with_options_of(args: Callable[P, Any]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the parameters and the docstring of `args`, for type checkers, editors and `help`."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        init.__doc__ = args.__doc__
        init.__signature__ = signature(args.__init__)  # type: ignore[attr-defined]
        return init

    return decorate


class LLM(PoolingMethods):
    """A model with its KV pool, for batches of prompts; or without, for embeddings, scores and classes.

    Its options are those of `kvllm.engine_args.EngineArgs`, which describes each of them: the directory of a
    checkpoint, or the id of a model on a hub, first, all others by keyword.

    Raises:
        ConfigError, CheckpointError: before any weights are read, wherever that can be known.
    """

    @_with_options_of(EngineArgs)
    def __init__(self, *args: Any, **options: Any) -> None:
        engine_args = EngineArgs(*args, **options)
        self.engine_args = engine_args
        self._default_params = SamplingParams(**engine_args.sampling_defaults)
        self.model_config = engine_args.model_config
        self._request_ids = count()
        self._pooling = PoolingEngine(engine_args) if engine_args.pooling else None
        if self._pooling:
            self.config, self.tokenizer = self._pooling.engine_config, self._pooling.tokenizer
            return
        self.cache_shape = cache_shape(engine_args)
        self._engine = build_engine(engine_args)
        self.config = self._engine.config
        self.tokenizer = self._engine.inputs.tokenizer
        self._calls = SharedEngine(self._engine)

    @property
    def llm_engine(self) -> Engine:
        """The engine that generates text. Raises RequestError if the model is run for embeddings, scores or classes."""
        if self._pooling:
            raise wrong_runner("generation", pooling=True)
        return self._engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Build the engine that these options describe."""
        options: dict[str, Any] = {field.name: getattr(engine_args, field.name) for field in fields(engine_args)}
        options["revision"] = engine_args.commit
        return cls(**options)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        priority: int | Iterable[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, as many at a time as the KV pool carries.

        Several threads may call: their prompts then run together.

        Args:
            prompts: a prompt, or an iterable of prompts. A prompt is text, token ids (a list, or a one-dimensional
                array or tensor of integers), or a dict with `prompt` or `prompt_token_ids`. A list of integers is one
                prompt, and so is a one-dimensional array of them; each line of a two-dimensional one is a prompt.
            sampling_params: for all prompts, or an iterable with one for each. Default: `get_default_sampling_params`.
            use_tqdm: show a progress bar; or what makes one, with the parameters of `tqdm`.
            lora_request: the adapter of all prompts, or one for each, where None is the model as it is.
            priority: of all prompts, or one for each; a lower number runs first. Default: 0.

        Returns:
            One output for each prompt, in order. Of several prompts, one that cannot be served has its `error` set; the
            others are not affected.

        Raises:
            RequestError: a single prompt cannot be served, or the arguments do not fit together.
            ConfigError: `sampling_params` are no SamplingParams.
        """
        return self._generate(*batch_of(prompts), sampling_params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Iterable[Any],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Iterable[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations through the checkpoint's chat template.

        Args:
            messages: a conversation, which is a list of messages `{"role": ..., "content": ...}`, or an iterable of
                conversations.
            sampling_params: as in `generate`, and so are `use_tqdm`, `lora_request` and `priority`.
            chat_template: the text of a template, instead of the checkpoint's.
            add_generation_prompt: end the prompt with what begins an answer. Default: unless the last message is
                continued.
            continue_final_message: let the model go on with the last message, instead of answering it.
            tools: that the model may call, as OpenAI's API has them. The template gets them as they are.
            chat_template_kwargs: passed to the template, e.g. `{"enable_thinking": False}`.

        Returns:
            One output for each conversation. Of several, one that the template cannot render, or that cannot be served,
            has its `error` set; the others are not affected.

        Raises:
            RequestError: a single conversation cannot be served, or the arguments do not fit together.
            ConfigError: `sampling_params` are no SamplingParams.
        """
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer, so it has no chat template: use generate")
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message goes on with the last message: leave out add_generation_prompt")
        conversations, alone = _conversations_of(messages)
        options: dict[str, Any] = {"add_generation_prompt": not continue_final_message}
        if add_generation_prompt is not None:
            options["add_generation_prompt"] = add_generation_prompt
        if continue_final_message:
            options["continue_final_message"] = True
        if chat_template is not None:
            options["chat_template"] = chat_template
        options |= chat_template_kwargs or {}
        prompts = [self._render(self.tokenizer, conversation, tools, options) for conversation in conversations]
        return self._generate(prompts, alone, sampling_params, use_tqdm, priority, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest continuations of prompts.

        Args:
            prompts: as in `generate`.
            lora_request: the adapter of all prompts.
            use_tqdm: show a progress bar.
            concurrency_limit: most prompts at once, if not all.

        Returns:
            One output for each prompt, in order, with up to `beam_width` completions, the best one first. Of several
            prompts, one that cannot be served has its `error` set. No KV pair is dropped, whatever the engine's
            compression is, as each step computes the beams that it needs from cached blocks.

        Raises:
            RequestError: a single prompt cannot be served, or the arguments cannot be obeyed.
        """
        adapter = self.llm_engine.inputs.adapter_of(lora_request)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise RequestError(f"concurrency_limit={concurrency_limit} is not allowed: at least 1, or None")
        batch, alone = batch_of(prompts)
        outputs, searches = self._begin_searches(batch, params)
        step = concurrency_limit or len(searches) or 1
        with tqdm(total=len(searches), desc="Beam search", disable=not use_tqdm) as bar:
            for some in (searches[first : first + step] for first in range(0, len(searches), step)):
                while running := [each for each in some if not each[1].is_done and each[0].error is None]:
                    self._advance(running, adapter)
                bar.update(len(some))
        for output, search in searches:
            if output.error is None:
                output.outputs = search.completions(self.tokenizer)
                output.sequences = search.sequences(self.tokenizer)
        if alone and (error := outputs[0].error):
            raise error
        return outputs

    def _begin_searches(
        self, prompts: list[Prompt], params: BeamSearchParams
    ) -> tuple[list[BeamSearchOutput], list[tuple[BeamSearchOutput, BeamSearch]]]:
        """The output of each prompt, and the searches of those that can be served."""
        outputs: list[BeamSearchOutput] = []
        searches: list[tuple[BeamSearchOutput, BeamSearch]] = []
        for prompt in prompts:
            output = BeamSearchOutput(str(next(self._request_ids)), None, [], [], finished=True)
            outputs.append(output)
            try:
                output.prompt, search = begin_search(self.llm_engine, prompt, params)
            except RequestError as error:
                output.error = error
            else:
                output.prompt_token_ids = search.prompt_token_ids
                searches.append((output, search))
        return outputs, searches

    def _advance(self, searches: list[tuple[BeamSearchOutput, BeamSearch]], adapter: Adapter | None) -> None:
        """Compute the next token of all beams of some searches together."""
        prompts = [(search, prompt) for _, search in searches for prompt in search.prompts()]
        params = [search.sampling_params() for search, _ in prompts]
        found = iter(self._generate([prompt for _, prompt in prompts], False, params, False, None, adapter))
        for output, search in searches:
            of_search = [next(found) for _ in search.beams]
            output.error = next((each.error for each in of_search if each.error), None)
            if output.error is None:
                search.advance([(each.outputs[0].logprobs or [])[0] for each in of_search])

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, as transformers has it. Raises RequestError if the checkpoint has none."""
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer")
        return self.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` use where they get none: the checkpoint's own (`generation_config`)."""
        return self._default_params

    def reset_prefix_cache(self) -> bool:
        """Let later requests find nothing of what is cached so far. Returns True."""

        def reset() -> RequestOutput:
            self.llm_engine.reset_prefix_cache()
            return RequestOutput("", None, [], [], finished=True)

        self._calls.run([("", reset)], lambda _: None)
        return True

    def stats(self) -> EngineStats:
        """Counters since the engine started. The object is live: it goes on counting."""
        return self.llm_engine.stats

    def get_metrics(self) -> list[Metric]:
        """The counters of `stats` that vLLM has, too, under its names."""
        return metrics_of(self.stats(), str(self.engine_args.model))

    def _generate(
        self,
        prompts: list[Any],
        alone: bool,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        use_tqdm: bool | Callable[..., tqdm],
        priority: int | Iterable[int] | None,
        lora_request: LoRARequest | Adapter | Iterable[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        """prompts: a RequestError stands for what could not be made a prompt. alone: errors are raised."""
        params = self._params_of(sampling_params, len(prompts))
        priorities = one_for_each("priority", 0 if priority is None else priority, int, len(prompts))
        adapters = one_for_each("lora_request", lora_request, LoRARequest | Adapter, len(prompts))
        orders = []
        for prompt, sampling, number, adapter in zip(prompts, params, priorities, adapters, strict=True):
            request_id = str(next(self._request_ids))
            orders.append((request_id, self._order(request_id, prompt, sampling, number, adapter)))
        outputs = self._run(orders, use_tqdm)
        if alone and (error := outputs[0].error):
            raise error
        return outputs

    def _params_of(self, sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = one_for_each("sampling_params", sampling_params, SamplingParams, num_prompts)
        for each in params:
            check_sampling(each)
        return params

    def _render(
        self, tokenizer: Tokenizer, messages: Any, tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> Prompt | RequestError:
        """The prompt of a conversation."""
        try:
            text = render_chat(tokenizer, messages, tools, options)
            # The template has written the special tokens already.
            return {"prompt": unmark(text), "prompt_token_ids": encode_marked(tokenizer, text)}
        except RequestError as error:
            return error

    def _order(
        self,
        request_id: str,
        prompt: Any,
        sampling: SamplingParams,
        priority: int,
        lora_request: LoRARequest | Adapter | None,
    ) -> Callable[[], RequestOutput]:
        """What adds a request to the engine, or returns the output of one that is refused. Text is encoded here, and
        files of adapters are read: other calls need not wait for it."""

        def refused(error: RequestError) -> RequestOutput:
            logger.warning("request %s is refused: %s", request_id, error)
            text = prompt if isinstance(prompt, str) else None
            return RequestOutput(request_id, text, [], [], finished=True, error=error)

        def add() -> RequestOutput:
            try:
                return self.llm_engine.add_request(
                    request_id, given, sampling, stream=False, priority=priority, lora_request=adapter
                )
            except RequestError as error:
                return refused(error)

        try:
            if isinstance(prompt, RequestError):
                raise prompt
            text, token_ids = self.llm_engine.inputs.tokens_of(prompt)
            adapter = self.llm_engine.inputs.adapter_of(lora_request)
        except RequestError as error:
            output = refused(error)
            return lambda: output
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        given = {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": salt}
        return add

    def _run(
        self, orders: list[tuple[str, Callable[[], RequestOutput]]], use_tqdm: bool | Callable[..., tqdm]
    ) -> list[RequestOutput]:
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=len(orders), desc="Processed prompts", disable=not use_tqdm) as bar:
            prompt_tokens, output_before = 0, self.stats().output_tokens
            begin = time.perf_counter()

            def report(finished: list[RequestOutput]) -> None:
                nonlocal prompt_tokens
                prompt_tokens += sum(len(output.prompt_token_ids) for output in finished)
                bar.update(len(finished))
                if use_tqdm:
                    output_tokens = self.stats().output_tokens - output_before
                    self._describe(bar, prompt_tokens, output_tokens, time.perf_counter() - begin)

            return self._calls.run(orders, report)

    def _describe(self, bar: tqdm, prompt_tokens: int, output_tokens: int, seconds: float) -> None:
        stats = self.stats()
        running, blocks = next(iter(stats.timeline_since(stats.steps - 1)), (0, 0))
        bar.set_postfix_str(
            f"input {prompt_tokens / seconds:.0f} tok/s, output {output_tokens / seconds:.0f} tok/s, "
            f"running {running}, KV pool {blocks / stats.num_blocks:.0%}",
            refresh=False,
        )


def _conversations_of(messages: Any) -> tuple[list[Any], bool]:
    """Conversations as a list, and whether it was a single one. A list without lists is one conversation."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        return [messages], True
    found = list(messages)
    return (found, False) if any(isinstance(each, list | tuple) for each in found) else ([found], True)
