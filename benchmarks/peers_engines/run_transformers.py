"""`generate` of transformers: one batch, padded on the left, as long as its longest request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers_engines.protocol import Job, Tokens, serve


class Transformers:
    kv = "bf16"

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=torch.bfloat16)
        self.model.generation_config.eos_token_id = None  # lengths are fixed

    @torch.inference_mode()
    def generate(self, prompts: Tokens, output_lengths: Sequence[int]) -> Tokens:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        outputs = self.model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max(output_lengths), pad_token_id=0
        )
        return [output[width : width + n].tolist() for output, n in zip(outputs, output_lengths, strict=True)]


if __name__ == "__main__":
    serve("transformers", Transformers)
