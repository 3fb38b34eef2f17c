"""llama.cpp through its C interface, with a loop of continuous batching: all prompts first, then a token for each.

Options: `format` ("bf16", "q8_0" or "q4_k_m", of the weights).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy

from benchmarks.peers_engines.protocol import Job, Tokens, serve

BATCH_TOKENS = 2048
FORMATS = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def convert(job: Job) -> None:
    """From the GGUF file in bfloat16 that the parent has written."""
    directory, name = Path(job["prepared"]), job["options"]["format"]
    source, target = directory / "bf16.gguf", directory / "model.gguf"
    if name == "bf16":
        source.rename(target)
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FORMATS[name]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) != 0:
        raise RuntimeError(f"llama.cpp could not convert the weights to {name}")
    source.unlink()


class LlamaCpp:
    kv = "f16"

    def __init__(self, job: Job) -> None:
        longest = max(len(p) + n for p, n in zip(job["prompts"], job["output_lengths"], strict=True))
        count = len(job["prompts"])
        self.vocab_size = job["vocab_size"]
        llama_cpp.llama_backend_init()
        path = Path(job["prepared"]) / "model.gguf"
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path.name}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = count * -(-longest // 256) * 256
        params.n_seq_max = count
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = job["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp could not make a context")
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(self, prompts: Tokens, output_lengths: Sequence[int]) -> Tokens:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        outputs: Tokens = [[] for _ in prompts]
        for begin, end in self._groups(prompts):
            slots = [(i, p, t) for i in range(begin, end) for p, t in enumerate(prompts[i])]
            last = [p == len(prompts[i]) - 1 for i, p, _ in slots]
            self._step(slots, last, outputs)
        while slots := [
            (i, len(prompts[i]) + len(tokens) - 1, tokens[-1])
            for i, tokens in enumerate(outputs)
            if len(tokens) < output_lengths[i]
        ]:
            self._step(slots, [True] * len(slots), outputs)
        return outputs

    def _groups(self, prompts: Tokens) -> list[tuple[int, int]]:
        """Ranges of prompts that fit into a batch."""
        groups, begin, size = [], 0, 0
        for i, prompt in enumerate(prompts):
            if size + len(prompt) > BATCH_TOKENS:
                groups.append((begin, i))
                begin, size = i, 0
            size += len(prompt)
        return [*groups, (begin, len(prompts))]

    def _step(self, slots: list[tuple[int, int, int]], sampled: list[bool], outputs: Tokens) -> None:
        """Compute (sequence, position, token) of `slots`, and append the likeliest next tokens."""
        batch = self.batch
        batch.n_tokens = len(slots)
        for row, (sequence, position, token) in enumerate(slots):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = sampled[row]
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama.cpp could not compute a batch")
        for row, (sequence, _, _) in enumerate(slots):
            if sampled[row]:
                logits = llama_cpp.llama_get_logits_ith(self.context, row)
                outputs[sequence].append(int(numpy.ctypeslib.as_array(logits, (self.vocab_size,)).argmax()))


if __name__ == "__main__":
    serve("llama-cpp-python", LlamaCpp, convert)
