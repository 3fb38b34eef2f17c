"""Sequences that the benchmarks of single steps decode, beside the interface of LLM."""

from __future__ import annotations

import random

from kvllm import LLM, RequestOutput, SamplingParams


def add_sequences(llm: LLM, number: int, context: int, max_tokens: int | None = None) -> list[RequestOutput]:
    """Sequences of random tokens, once their prompts are computed. Without `max_tokens` they never end."""
    params, engine = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), llm.llm_engine
    rng, vocabulary = random.Random(0), range(llm.model_config.vocab_size)
    outputs = [engine.add_request(str(i), rng.choices(vocabulary, k=context), params) for i in range(number)]
    while not all(output.outputs[0].token_ids for output in outputs):
        engine.step()
    return outputs
