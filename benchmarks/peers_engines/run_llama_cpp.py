"""llama.cpp, or ik_llama.cpp, its fork, through the C interface: all prompts first, then a token for each sequence.

Options: `format` ("bf16", "q8_0" or "q4_k_m", of converted weights), `kv` ("f16" or "q8_0", of the KV cache), `drafts`
(most tokens of a draft from the text itself, for one request; default none).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from benchmarks.peers_engines.protocol import KV_ITEMSIZE, Job, Tokens, serve

try:
    import llama_cpp
except ModuleNotFoundError:  # the environment of ik_llama.cpp
    import ik_llama_cpp._ctypes_api as llama_cpp

BATCH_TOKENS = 2048
IS_FORK = not hasattr(llama_cpp, "llama_memory_clear")
KV_TYPES = {"f16": 1, "q8_0": 8}
"""Numbers of ggml's types."""
Slot = tuple[int, int, int]
"""Sequence, position and token."""


def convert(job: Job) -> None:
    """From the GGUF file in bfloat16 that the parent has written."""
    directory, name = Path(job["prepared"]), job["options"]["format"]
    source, target = directory / "bf16.gguf", directory / "model.gguf"
    if name == "bf16":
        source.rename(target)
        return
    params = llama_cpp.llama_model_quantize_default_params()
    formats = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}
    params.ftype = formats[name]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) != 0:
        raise RuntimeError(f"llama.cpp could not convert the weights to {name}")
    source.unlink()


class LlamaCpp:
    def __init__(self, job: Job) -> None:
        longest = max(len(p) + n for p, n in zip(job["prompts"], job["output_lengths"], strict=True))
        count = len(job["prompts"])
        self.vocab_size = job["vocab_size"]
        self.kv = job["options"]["kv"]
        self.kv_itemsize, self.prompt_seconds = KV_ITEMSIZE[self.kv], None
        llama_cpp.llama_backend_init()
        path = Path(job["prepared"])
        path = path if path.is_file() else path / "model.gguf"
        of_model = llama_cpp.llama_model_default_params()
        if IS_FORK:
            of_model.repack_tensors, of_model.use_mmap = True, False  # its fastest weights
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), of_model)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path.name}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = count * -(-longest // 256) * 256
        params.n_seq_max = count
        params.n_batch = BATCH_TOKENS
        if IS_FORK:
            params.flash_attn = count == 1  # with more it aborts where a query sees none of a part of the KV pairs
        else:
            params.swa_full = False
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = KV_TYPES[self.kv]
        params.n_threads = params.n_threads_batch = job["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp could not make a context")
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        drafts = job["options"].get("drafts")
        self.lookup = _prompt_lookup(drafts) if drafts else None

    def generate(self, prompts: Tokens, output_lengths: Sequence[int]) -> Tokens:
        outputs: Tokens = [[] for _ in prompts]
        begin = time.perf_counter()
        for slots in self._batches(prompts):
            last = [p == len(prompts[i]) - 1 for i, p, _ in slots]
            for i, logits in self._step(slots, last):
                outputs[i].append(int(logits.argmax()))
        self.prompt_seconds = time.perf_counter() - begin
        if self.lookup:
            return [self._with_drafts(prompts[0], outputs[0], output_lengths[0])]
        while slots := [
            (i, len(prompts[i]) + len(tokens) - 1, tokens[-1])
            for i, tokens in enumerate(outputs)
            if len(tokens) < output_lengths[i]
        ]:
            for i, logits in self._step(slots, [True] * len(slots)):
                outputs[i].append(int(logits.argmax()))
        return outputs

    def _with_drafts(self, prompt: list[int], output: list[int], length: int) -> list[int]:
        """The output, of which the first token is given."""
        assert self.lookup
        while len(output) < length:
            end = len(prompt) + len(output)
            drafts = self.lookup(numpy.array(prompt + output, numpy.intc))[: length - len(output) - 1].tolist()
            slots = [(0, end - 1 + i, token) for i, token in enumerate([output[-1], *drafts])]
            found = [int(logits.argmax()) for _, logits in self._step(slots, [True] * len(slots))]
            right = next((i for i, token in enumerate(drafts) if token != found[i]), len(drafts))
            output += found[: right + 1]
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, end + right, -1)
        return output

    def losses(self, prompts: Tokens) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in prompts]
        for prompt, of_prompt in zip(prompts, found, strict=True):
            for slots in self._batches([prompt]):
                for position, (_, logits) in enumerate(self._step(slots, [True] * len(slots)), slots[0][1] + 1):
                    if position < len(prompt):
                        numbers = logits.astype(numpy.float64)
                        largest = numbers.max()
                        total = numpy.log(numpy.exp(numbers - largest).sum()) + largest
                        of_prompt.append(float(total - numbers[prompt[position]]))
        return found

    def _batches(self, prompts: Tokens) -> Iterator[list[Slot]]:
        """All tokens of all prompts, from an empty cache on."""
        if IS_FORK:
            llama_cpp.llama_kv_cache_clear(self.context)
        else:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        slots = [(i, p, t) for i, prompt in enumerate(prompts) for p, t in enumerate(prompt)]
        yield from (slots[begin : begin + BATCH_TOKENS] for begin in range(0, len(slots), BATCH_TOKENS))

    def _step(self, slots: list[Slot], sampled: list[bool]) -> Iterator[tuple[int, Any]]:
        """Compute `slots`: the sequence and the logits of each of those that are sampled."""
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
                yield sequence, numpy.ctypeslib.as_array(logits, (self.vocab_size,))


def _prompt_lookup(drafts: int) -> Any:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    return LlamaPromptLookupDecoding(num_pred_tokens=drafts)


if __name__ == "__main__":
    serve("ik-llama-cpp-python" if IS_FORK else "llama-cpp-python", LlamaCpp, convert)
