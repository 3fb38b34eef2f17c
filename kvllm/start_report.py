"""What the log says of an engine that was started."""

from __future__ import annotations

import logging

from kvllm.compression.specs import AUTO, FROM_ALL
from kvllm.core.capacity import longest_blocks
from kvllm.engine_args import EngineArgs
from kvllm.worker.build import Loaded, RunnerSettings

logger = logging.getLogger(__name__)

MIB = 1 << 20
AUTO_COSTS = {FROM_ALL: ": in a quarter of the bytes SmolLM2-135M loses 0.087 nats, by lot 0.149"}
"""What docs/accuracy.md has measured on real models of a method that `method="auto"` may choose."""


def report_start(
    args: EngineArgs, settings: RunnerSettings, device: str, loaded: Loaded, block_bytes: int, *, has_tokenizer: bool
) -> None:
    """Say in a line what was started, and what is wrong with it."""
    config, num_ranks = settings.engine, args.tensor_parallel_size * args.data_parallel_size
    logger.info(
        "%s (%s, %s) on %s%s; attention backend %s; KV pool of %d blocks of %d tokens%s, %s MiB%s; %s",
        args.name,
        settings.model.architecture,
        settings.dtype,
        device,
        f", {num_ranks} ranks on Ray" if args.uses_ray else "",
        loaded.attention_backend,
        config.num_blocks,
        config.block_size,
        "" if config.kv_cache_dtype == "auto" else f" in {config.kv_cache_dtype}",
        f"{config.num_blocks * block_bytes / MIB:,.1f}",
        " for each rank" if num_ranks > 1 else "",
        _compression(args, settings),
    )
    for note in (loaded.weights, loaded.collectives):
        if note:
            logger.info("%s: %s", args.name, note)
    if not has_tokenizer:
        logger.warning(
            "%s has no tokenizer: prompts must be token ids and outputs have no text, so that chats, stop strings and "
            "structured outputs are refused; add its tokenizer.json or tokenizer.model",
            args.path,
        )
    if args.dtype == "float16" and settings.dtype == "float32":
        logger.warning("dtype='float16' is not computed on a CPU: it runs as float32")
    for warning in loaded.warnings:
        logger.warning(warning)
    if (blocks := longest_blocks(config)) > config.num_blocks:
        logger.warning(
            "the KV pool has %d blocks of %d tokens, and a sequence of max_model_len=%d needs %d: longer ones than fit "
            "are refused. Raise kv_cache_memory_bytes or num_gpu_blocks_override, or set max_model_len",
            config.num_blocks,
            config.block_size,
            config.max_model_len,
            blocks,
        )


def _compression(args: EngineArgs, settings: RunnerSettings) -> str:
    compression = settings.engine.compression
    if compression is None or args.compression is None:
        return "no compression"
    chosen = f" (method=auto{AUTO_COSTS.get(compression.method, '')})" if args.compression.method == AUTO else ""
    kept = {group.retain_blocks for group in compression.named_groups}
    shares = f", layers keep {min(kept)} to {max(kept)} of {compression.policy.window_blocks} blocks" if kept else ""
    return f"compression by {compression.method}{chosen}, {compression.policy.name}{shares}"
