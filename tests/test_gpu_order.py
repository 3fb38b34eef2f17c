"""On a GPU, tests come in the order in which they say most."""

from __future__ import annotations

from tests.helpers.gpu_order import PARTS, place

IN_ORDER = (
    "tests/worker/test_engine_on_cuda.py::test_every_token_has_the_largest_logit_up_to_rounding[qwen3-float32-eager]",
    "tests/worker/test_graphs.py::test_batches_of_every_size[options0-cuda]",
    "tests/kernels/test_memory_errors.py::test_prefills_and_decodes_access_what_is_theirs",
    "tests/kernels/test_kernel_devices.py::test_rotation[96-False-cuda-dtype3]",
    "tests/attention/test_attention_devices.py::test_quantized_caches[int8-dtype1-cuda]",
    "tests/worker/test_first_requests.py::test_the_first_request_of_a_kind_waits_for_no_compiler",
    "tests/worker/test_engine_on_cuda.py::test_every_token_has_the_largest_logit_up_to_rounding[llama-bfloat16]",
    "tests/worker/test_engine_on_cuda.py::test_compression_is_that_of_the_cpu[periodic-True]",
    "tests/worker/test_device.py::test_what_does_not_fit_on_cuda",
)


def test_the_order_of_tests_on_a_gpu() -> None:
    assert sorted({*IN_ORDER}, key=place) == list(IN_ORDER)
    assert {place(name)[0] for name in IN_ORDER} == set(range(1, len(PARTS) + 1))
