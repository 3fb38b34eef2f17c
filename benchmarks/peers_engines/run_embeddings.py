"""Embeddings of texts, the normalized states of their last tokens, in float32 on one thread.

A job has `engine` ("kvllm", "sentence-transformers" or "openvino"), `checkpoint` and `texts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers_engines.protocol import Job, answer

Embed = Callable[[list[str]], list[list[float]]]


def kvllm(job: Job) -> Embed:
    from kvllm import LLM

    llm = LLM(job["checkpoint"], runner="pooling", dtype="float32")
    return lambda texts: [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)]


def sentence_transformers(job: Job) -> Embed:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(job["checkpoint"], device="cpu", model_kwargs={"dtype": "float32"})
    module: Any = model[0]
    module.modality_config.pop("message", None)  # a chat template would be put around every text
    model.tokenizer.chat_template = None
    return lambda texts: model.encode(texts, normalize_embeddings=True, show_progress_bar=False).tolist()


def openvino(job: Job) -> Embed:
    """Text by text, which is faster than batches with padding."""
    import openvino
    import torch
    from transformers import AutoModel, AutoTokenizer

    class LastState(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(job["checkpoint"], dtype=torch.float32)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            place = torch.arange(input_ids.shape[1])
            mask = (place[:, None] >= place)[None, None]  # what transformers makes of none cannot be converted
            states = self.model(input_ids, attention_mask=mask, position_ids=place[None], use_cache=False)[0]
            return torch.nn.functional.normalize(states[:, -1], dim=-1)

    tokenizer = AutoTokenizer.from_pretrained(job["checkpoint"])
    with torch.inference_mode():
        converted = openvino.convert_model(LastState().eval(), example_input={"input_ids": torch.ones(1, 9).long()})
    config = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(converted, "CPU", config)
    return lambda texts: [model(tokenizer(text, return_tensors="np")["input_ids"])[0][0].tolist() for text in texts]


def measure(job: Job) -> dict[str, Any]:
    """Embed the texts once to warm up, then once more."""
    load = {"kvllm": kvllm, "sentence-transformers": sentence_transformers, "openvino": openvino}[job["engine"]]
    embed = load(job)
    embed(job["texts"])
    begin, busy = time.perf_counter(), time.process_time()
    found = embed(job["texts"])
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    return {"seconds": seconds, "processor_seconds": busy, "embeddings": found}


if __name__ == "__main__":
    answer(measure)
