"""KvLLM, in the environment of this project."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers_engines.protocol import Job, Tokens, pool_blocks, serve
from kvllm import LLM, CompressionConfig, SamplingParams

BLOCK_SIZE = 32
"""Tokens in a block, as in other engines. Larger ones are as fast here, and hold more that no request fills."""


class KvLLM:
    def __init__(self, job: Job) -> None:
        lengths = [len(p) + n for p, n in zip(job["prompts"], job["output_lengths"], strict=True)]
        options, fraction = dict(job["options"]), job["pool_fraction"]
        if "compression" in options:
            options["compression"] = CompressionConfig(**options["compression"])
        self.llm = LLM(
            job["checkpoint"],
            block_size=BLOCK_SIZE,
            max_model_len=max(lengths),
            max_num_seqs=len(lengths),
            num_gpu_blocks_override=None if fraction == 1 else pool_blocks(lengths, BLOCK_SIZE, fraction),
            **options,
        )
        shape = self.llm.cache_shape
        self.kv = options.get("kv_cache_dtype") or {2: "bf16", 4: "f32"}[shape.dtype.itemsize]
        self.kv_itemsize = shape.pair_bytes / (2 * shape.head_dim)
        self.prompt_seconds: float | None = None

    def generate(self, prompts: Tokens, output_lengths: Sequence[int]) -> Tokens:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in output_lengths]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        times = [output.metrics for output in outputs]
        arrived, first = times[0].arrival_time, [each.first_token_time for each in times if each.first_token_time]
        self.prompt_seconds = max(first) - arrived
        return [list(output.outputs[0].token_ids) for output in outputs]

    def losses(self, prompts: Tokens) -> list[list[float]]:
        params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [
            [-found[token].logprob for found, token in zip(output.prompt_logprobs or (), prompt, strict=True) if found]
            for output, prompt in zip(outputs, prompts, strict=True)
        ]


if __name__ == "__main__":
    serve("kvllm", KvLLM)
