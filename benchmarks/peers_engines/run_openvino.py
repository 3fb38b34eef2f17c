"""OpenVINO GenAI with continuous batching.

Options: `weights` ("bf16" or "int8"), `kv` ("bf16" or "u8", the format of the KV cache), `evicts` (whether every
sequence keeps only its share of a small pool).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers_engines.protocol import KV_ITEMSIZE, Job, Tokens, pool_blocks, serve

BLOCK_SIZE = 32
"""Tokens in a block of the KV cache on a CPU."""
RECENT_TOKENS = 128
"""Tokens at the end of a sequence that eviction keeps."""


def export(job: Job) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    directory = Path(job["prepared"])
    task = "text-generation-with-past"
    main_export(
        job["checkpoint"], output=directory, task=task, ov_config=OVConfig(dtype="auto"), convert_tokenizer=False
    )
    if job["options"]["weights"] == "int8":
        _quantize(directory)


def _quantize(directory: Path) -> None:
    """All matrices in 8 bits with a scale and a zero point for each output, as the exporter's INT8 format has them."""
    import nncf
    import openvino

    whole = directory / "openvino_model.xml"
    model = nncf.compress_weights(openvino.Core().read_model(whole), mode=nncf.CompressWeightsMode.INT8_ASYM)
    openvino.save_model(model, directory / "int8.xml", compress_to_fp16=False)
    del model  # it maps the file that is replaced
    for ending in ("xml", "bin"):
        (directory / f"int8.{ending}").replace(directory / f"openvino_model.{ending}")


class OpenVINO:
    def __init__(self, job: Job) -> None:
        import openvino
        import openvino_genai

        self.genai = openvino_genai
        lengths = [len(p) + n for p, n in zip(job["prompts"], job["output_lengths"], strict=True)]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = pool_blocks(lengths, BLOCK_SIZE, job["pool_fraction"]) + len(lengths)
        scheduler.max_num_seqs = len(lengths)
        scheduler.max_num_batched_tokens = 2048
        if job["options"]["evicts"]:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = self._eviction(max(lengths), job["pool_fraction"])
        capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        self.kv = job["options"]["kv"]
        if self.kv == "bf16" and "BF16" not in capabilities:
            self.kv = "f32"  # the only one beside u8 that it has for such CPUs
        self.kv_itemsize, self.prompt_seconds = KV_ITEMSIZE[self.kv], None
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            Path(job["prepared"]), scheduler, "CPU", {"KV_CACHE_PRECISION": self.kv}
        )

    def _eviction(self, longest: int, fraction: float):
        """The defaults of its documentation, with as many blocks for each sequence as the pool has."""
        kept = int(fraction * -(-longest // BLOCK_SIZE)) * BLOCK_SIZE
        return self.genai.CacheEvictionConfig(
            start_size=BLOCK_SIZE,
            recent_size=RECENT_TOKENS,
            max_cache_size=kept,
            aggregation_mode=self.genai.AggregationMode.NORM_SUM,
        )

    def generate(self, prompts: Tokens, output_lengths: Sequence[int]) -> Tokens:
        import numpy
        import openvino

        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        configs = [self._config(n) for n in output_lengths]
        return [list(result.m_generation_ids[0]) for result in self.pipeline.generate(inputs, configs)]

    def _config(self, num_tokens: int):
        config = self.genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.set_eos_token_id(0)  # a tokenizer would give one, and the checkpoint may have none
        config.ignore_eos = True
        config.do_sample = False
        return config


if __name__ == "__main__":
    serve("openvino-genai", OpenVINO, export)
