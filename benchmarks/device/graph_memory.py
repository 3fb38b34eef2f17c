"""GPU memory that captured graphs take: the first two, all of them, and what the engine expects from two."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.common.internals import runner_of
from benchmarks.device.log import Figures, Log
from benchmarks.device.shapes import LLAMA_8B, write_shape
from benchmarks.device.target import Target
from kvllm import LLM
from kvllm.worker.graphs import cuda_capture
from kvllm.worker.memory import measure_graphs

MAX_NUM_SEQS, NUM_BLOCKS = 256, 64


def run(target: Target, log: Log) -> None:
    if target.dry_run:
        log.left_out("all", "there are no graphs on a CPU")
    else:
        log.measure(f"{LLAMA_8B}, up to {MAX_NUM_SEQS} sequences", partial(graph_memory, target))


@torch.inference_mode()
def graph_memory(target: Target) -> Figures:
    runner = runner_of(make_llm(target))
    expected = measure_graphs(runner, NUM_BLOCKS)
    free = [free_bytes(target)]
    runner.forward_pass.use_graphs(cuda_capture(), NUM_BLOCKS, largest_alone=True)
    free.append(free_bytes(target))
    graphs = runner.forward_pass.graphs
    assert graphs is not None  # they were turned on
    others = graphs.sizes.all()[1:]
    for sizes in (others[:1], others[1:]):
        graphs.capture(sizes)
        free.append(free_bytes(target))
    return {
        "graphs": 1 + len(others),
        "first_graph_bytes": free[0] - free[1],
        "second_graph_bytes": free[1] - free[2],
        "graph_bytes": free[0] - free[3],
        "expected_graph_bytes": expected,
    }


def make_llm(target: Target) -> LLM:
    with tempfile.TemporaryDirectory() as directory:
        return LLM(
            write_shape(target, LLAMA_8B, Path(directory)),
            load_format="dummy",
            max_model_len=target.size(8192, 64),
            block_size=target.size(256, 16),
            max_num_seqs=target.size(MAX_NUM_SEQS, 4),
            num_gpu_blocks_override=NUM_BLOCKS,
            enforce_eager=True,
        )


def free_bytes(target: Target) -> int:
    target.synchronize()
    target.release_memory()
    return torch.cuda.mem_get_info(target.device)[0]
