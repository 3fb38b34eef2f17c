"""LLM: the offline batch API. Reads like vLLM's."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs
from tqdm import tqdm

from kvllm.config import OBSERVING_METHODS, CompressionConfig, EngineConfig, require
from kvllm.core.compression_policy import check_pool
from kvllm.core.engine import LLMEngine
from kvllm.core.input_processor import Prompt
from kvllm.errors import ConfigError, RequestError
from kvllm.kvcache.cache import CacheShape
from kvllm.models.config import ModelConfig, load_model_config
from kvllm.outputs import RequestOutput
from kvllm.parallel import SingleRank
from kvllm.sampling_params import SamplingParams
from kvllm.stats import EngineStats
from kvllm.tokenizer import has_tokenizer, load_tokenizer
from kvllm.worker.attention_state import AttentionMass
from kvllm.worker.build import DTYPES, RunnerSettings, make_runner
from kvllm.worker.host_memory import available_memory
from kvllm.worker.inline import InlineExecutor

if TYPE_CHECKING:
    from kvllm.distributed.executor import RayExecutor
    from kvllm.distributed.replicas.engine import DataParallelEngine
    from kvllm.distributed.replicas.replica_set import ReplicaSet

logger = logging.getLogger(__name__)

DEFAULT_MODEL = Path(__file__).parent / "assets" / "reasoner"
BACKENDS = ("inline", "ray")
DEVICES = ("auto", "cuda", "cpu")
PLACEMENTS = ("STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD")
GIB = 1 << 30


class LLM:
    """A model with its KV pool, for batches of prompts.

    Args:
        model: directory of a Hugging Face checkpoint (config.json, safetensors, tokenizer). Default: the small
            reasoning model that comes with the package.
        dtype: "bfloat16", "float32", "float16" (on a GPU alone), or "auto" for the checkpoint's own; on a CPU, float16
            runs as float32, and one without bfloat16 products holds bfloat16 weights in float32.
        device: "cuda", "cpu", or "auto" for a GPU if there is one. With Ray, the cluster decides.
        max_model_len: longest sequence in tokens, prompt and output; default what the model was made for.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens of one step; longer prompts are computed in chunks, and what takes more to
            compress is compressed over several steps.
        block_size: tokens of a KV block, 1 to 256.
        num_gpu_blocks_override: blocks in the KV pool, or
        kv_cache_memory_bytes: its size in bytes, on each rank. Default: on a GPU, what model and steps leave of
            `gpu_memory_utilization`; else half of the free memory, 4 GiB at most.
        gpu_memory_utilization: share of a GPU's memory that may be in use, by other processes too.
        enforce_eager: on a GPU, launch kernels one by one, instead of replaying CUDA graphs of decode steps.
        enable_prefix_caching: let requests share the blocks of equal beginnings.
        tensor_parallel_size: ranks that share the model, each a process; more than one need Ray (docs/distributed.md).
        data_parallel_size: engines that share out the requests, each with its own ranks and KV pool, on Ray.
        distributed_executor_backend: "inline" (one rank, in this process) or "ray"; default "ray" for several ranks.
        placement_strategy: where Ray puts the ranks: "STRICT_PACK" (one node), "PACK", "SPREAD" or "STRICT_SPREAD".
        max_worker_restarts: how many times lost workers are replaced before `generate` raises.
        seed: of requests that bring none.
        compression: how the KV cache is compressed while decoding; None for not at all.
        attention_backend: "triton", "flash_attn", "xformers", "cpu", "reference", or "auto" for the fastest of those
            that can do what is asked.
        load_format: "auto" reads the checkpoint's weights, "dummy" makes random ones from its config.json alone.

    Raises:
        ConfigError, CheckpointError: before any weights are read, wherever that can be known.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        block_size: int = 256,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        enable_prefix_caching: bool = True,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        distributed_executor_backend: str | None = None,
        placement_strategy: str = "STRICT_PACK",
        max_worker_restarts: int = 3,
        seed: int = 0,
        compression: CompressionConfig | None = None,
        attention_backend: str = "auto",
        load_format: str = "auto",
    ) -> None:
        path = Path(model)
        self.model_config = load_model_config(path)
        _check_parallel(tensor_parallel_size, self.model_config)
        field, value = "data_parallel_size", data_parallel_size
        require(type(value) is int and value >= 1, field, value, "at least 1")
        _check_workers(placement_strategy, max_worker_restarts)
        backend = _backend(distributed_executor_backend, tensor_parallel_size, data_parallel_size)
        device = _device(device, backend)
        dtype = _dtype(dtype, self.model_config, device)
        field, value = "gpu_memory_utilization", gpu_memory_utilization
        require(type(value) in (int, float) and 0 < value <= 1, field, value, "greater than 0 and at most 1")
        length = _model_length(max_model_len, self.model_config)
        require(load_format in ("auto", "dummy"), "load_format", load_format, "choose one of auto, dummy")
        require(type(block_size) is int and 1 <= block_size <= 256, "block_size", block_size, "between 1 and 256")
        shape = CacheShape(
            self.model_config.num_layers,
            max(1, self.model_config.num_kv_heads // tensor_parallel_size),
            self.model_config.head_dim,
            block_size,
            DTYPES[dtype],
        )
        require(type(max_num_seqs) is int and max_num_seqs >= 1, "max_num_seqs", max_num_seqs, "at least 1")
        most_useful = max_num_seqs * -(-length // block_size)
        state_bytes = _state_bytes(compression, shape, max_num_seqs, length)
        self.cache_shape = shape
        self.tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
        self._request_ids = count()
        with ExitStack() as started:  # ended here unless all goes well
            workers = None
            if backend == "ray":
                workers = _start_workers(
                    data_parallel_size, tensor_parallel_size, placement_strategy, max_worker_restarts
                )
                started.callback(workers.close)
            device = workers.device if workers else device
            profiles = device == "cuda" and num_gpu_blocks_override is None and kv_cache_memory_bytes is None
            free = workers.available_memory if workers else available_memory()
            num_blocks = most_useful
            if not profiles:
                num_blocks = _num_blocks(
                    num_gpu_blocks_override, kv_cache_memory_bytes, shape, most_useful, state_bytes, free
                )
            self.config = EngineConfig(
                num_blocks=num_blocks,
                max_model_len=length,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_prefix_caching=enable_prefix_caching,
                seed=seed,
                compression=compression,
            )
            if max_model_len is not None:
                check_pool(self.config)
            settings = RunnerSettings(
                str(path.resolve()),
                self.model_config,
                self.config,
                dtype,
                attention_backend,
                load_format,
                enforce_eager,
                gpu_memory_utilization if profiles else None,
            )
            self.llm_engine = self._engine(settings, workers, device, data_parallel_size)
            if max_model_len is not None:
                check_pool(self.config)  # of the size that was found
            started.pop_all()
        self.llm_engine.stats.method_state_bytes = state_bytes * data_parallel_size

    def _engine(
        self, settings: RunnerSettings, workers: RayExecutor | ReplicaSet | None, device: str, data_parallel_size: int
    ) -> LLMEngine | DataParallelEngine:
        """Load the model, on Ray's workers or in this process, and learn how many blocks there are."""
        options = {
            "vocab_size": self.model_config.vocab_size,
            "eos_token_ids": self.model_config.eos_token_ids,
            "tokenizer": self.tokenizer,
        }
        if workers:
            self.config = structs.replace(self.config, num_blocks=workers.load(settings))
            if data_parallel_size == 1:
                return LLMEngine(self.config, workers, **options)
            from kvllm.distributed.replicas.engine import DataParallelEngine

            return DataParallelEngine(self.config, workers, **options)
        runner = make_runner(settings, SingleRank(), torch.device(device))
        self.config = structs.replace(self.config, num_blocks=runner.cache.num_blocks)
        return LLMEngine(self.config, InlineExecutor(runner), **options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, as many at a time as the KV pool carries.

        Args:
            prompts: a prompt or a list of them: text, token ids, or a dict with `prompt` or `prompt_token_ids`.
            sampling_params: for all prompts, or a list with one for each. Default: `SamplingParams()`.
            use_tqdm: show a progress bar.

        Returns:
            One output for each prompt, in order. In a list of prompts, one that cannot be served has its `error` set
            and no outputs; the others are not affected.

        Raises:
            RequestError: a single prompt cannot be served, or the arguments do not fit together.
        """
        alone = _is_one_prompt(prompts)
        batch: list[Any] = [prompts] if alone else list(prompts)
        params = _one_for_each(sampling_params, len(batch))
        if self.llm_engine.has_unfinished_requests():
            raise RequestError("llm_engine has unfinished requests: call llm_engine.step() until they have ended")
        outputs: list[RequestOutput] = []
        try:
            for prompt, each in zip(batch, params, strict=True):
                outputs.append(self._add(prompt, each, alone))
            self._run(outputs, use_tqdm)
        finally:
            for output in outputs:
                self.llm_engine.abort(output.request_id)  # only what an exception left unfinished
        return outputs

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations through the checkpoint's chat template.

        Args:
            messages: a conversation, a list of `{"role": ..., "content": ...}`, or a list of conversations.
            chat_template_kwargs: passed to the template, e.g. `{"enable_thinking": False}`.
        """
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer, so it has no chat template: use generate")
        alone = not messages or isinstance(messages[0], Mapping)
        options = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        conversations = [messages] if alone else messages
        texts = [self.tokenizer.apply_chat_template(conversation, **options) for conversation in conversations]
        # The template has written the special tokens already.
        prompts = [{"prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)} for text in texts]
        return self.generate(prompts[0] if alone else prompts, sampling_params, use_tqdm)

    def stats(self) -> EngineStats:
        """Counters since the engine started. The object is live: it goes on counting."""
        return self.llm_engine.stats

    def _add(self, prompt: Prompt, sampling_params: SamplingParams, alone: bool) -> RequestOutput:
        request_id = str(next(self._request_ids))
        try:
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
        running, blocks = self.stats().timeline[-1] if self.stats().timeline else (0, 0)
        bar.set_postfix_str(
            f"input {prompt_tokens / seconds:.0f} tok/s, output {output_tokens / seconds:.0f} tok/s, "
            f"running {running}, KV pool {blocks / self.stats().num_blocks:.0%}",
            refresh=False,
        )


def _check_parallel(tensor_parallel_size: int, model: ModelConfig) -> None:
    field, value = "tensor_parallel_size", tensor_parallel_size
    require(type(value) is int and value >= 1, field, value, "at least 1")
    heads = model.num_kv_heads
    shared_out = heads % value == 0 or value % heads == 0
    require(shared_out, field, value, f"a divisor of the model's {heads} KV heads, or a multiple of them")
    sizes = {
        "query heads": model.num_query_heads,
        "MLP columns": model.intermediate_size,
    }
    for name, size in sizes.items():
        require(size % value == 0, field, value, f"a divisor of the model's {size} {name}")


def _check_workers(placement_strategy: str, max_worker_restarts: int) -> None:
    field, value = "placement_strategy", placement_strategy
    require(value in PLACEMENTS, field, value, f"choose one of {', '.join(PLACEMENTS)}")
    field, value = "max_worker_restarts", max_worker_restarts
    require(type(value) is int and value >= 0, field, value, "at least 0")


def _backend(name: str | None, tensor_parallel_size: int, data_parallel_size: int) -> str:
    alone = tensor_parallel_size == data_parallel_size == 1
    if name is None:
        return "inline" if alone else "ray"
    field = "distributed_executor_backend"
    require(name in BACKENDS, field, name, f"choose one of {', '.join(BACKENDS)}, or None")
    if name == "inline":
        sizes = f"tensor_parallel_size={tensor_parallel_size} and data_parallel_size={data_parallel_size}"
        require(alone, field, name, f'it runs one rank, with {sizes} there are more: use "ray" or None')
    return name


def _start_workers(num_engines: int, num_ranks: int, placement: str, max_restarts: int) -> RayExecutor | ReplicaSet:
    try:
        from kvllm.distributed.executor import RayExecutor
        from kvllm.distributed.replicas.replica_set import ReplicaSet
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} with data_parallel_size={num_engines} on several processes needs Ray, "
            'which is not installed: pip install "kvllm[ray]" (or: pip install ray), or leave both at 1'
        ) from error
    if num_engines > 1:
        return ReplicaSet(num_engines, num_ranks, placement, max_restarts)
    return RayExecutor(num_ranks, placement, max_restarts)


def _device(device: str, backend: str) -> str:
    require(device in DEVICES, "device", device, f"choose one of {', '.join(DEVICES)}")
    with_ray = 'Ray runs ranks on GPUs if the cluster has enough of them, else on CPUs: use "auto"'
    require(backend == "inline" or device == "auto", "device", device, with_ray)
    available = torch.cuda.is_available()
    require(available or device != "cuda", "device", device, 'torch finds no GPU here: use "auto" or "cpu"')
    return device if device != "auto" else "cuda" if available else "cpu"


def _dtype(dtype: str, model: ModelConfig, device: str) -> str:
    if dtype == "auto":
        return "float32" if device == "cpu" and model.dtype == "float16" else model.dtype
    require(dtype in DTYPES, "dtype", dtype, f"choose one of auto, {', '.join(DTYPES)}")
    return dtype


def _model_length(max_model_len: int | None, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if max_model_len is None:
        return longest
    fits = type(max_model_len) is int and 2 <= max_model_len <= longest
    require(fits, "max_model_len", max_model_len, f"between 2 and the model's max_position_embeddings={longest}")
    return max_model_len


def _state_bytes(compression: CompressionConfig | None, shape: CacheShape, max_num_seqs: int, length: int) -> int:
    """What the compression method keeps beside the cache; it counts as memory of the cache."""
    if not isinstance(compression, CompressionConfig) or compression.method not in OBSERVING_METHODS:
        return 0
    if not compression.keeps_all(shape.block_size):
        return AttentionMass.bytes_for(shape, max_num_seqs, length)
    return 0


def _num_blocks(
    override: int | None, memory: int | None, shape: CacheShape, most_useful: int, state_bytes: int, free: int
) -> int:
    """Blocks in the pool, from the two ways to ask for them, or from the free memory; of memory, `state_bytes` less."""
    if override is not None and memory is not None:
        raise ConfigError(
            f"num_gpu_blocks_override={override} and kv_cache_memory_bytes={memory} both size the KV pool: give one"
        )
    if override is not None:
        require(type(override) is int and override >= 1, "num_gpu_blocks_override", override, "at least 1")
        return override
    if memory is None:
        available = min(4 * GIB, free // 2) - state_bytes
        return max(1, min(most_useful, available // shape.bytes_per_block))
    least = shape.bytes_per_block + state_bytes
    one_block = f"at least one block of {shape.block_size} tokens, {shape.bytes_per_block} bytes"
    if state_bytes:
        one_block += f", beside {state_bytes} bytes for the method: lower max_num_seqs or max_model_len to shrink these"
    require(type(memory) is int and memory >= least, "kv_cache_memory_bytes", memory, one_block)
    return (memory - state_bytes) // shape.bytes_per_block


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    return bool(prompts) and all(type(item) is int for item in prompts)


def _one_for_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    params = list(params)
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} sampling_params for {num_prompts} prompts: give one for all or one for each")
    for each in params:
        if not isinstance(each, SamplingParams):
            raise RequestError(f"sampling_params are of type SamplingParams, {each!r} is not")
    return params
