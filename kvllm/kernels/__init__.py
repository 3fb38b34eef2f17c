"""Triton kernels and their launchers, one kernel to a file. Nothing here may be imported where Triton is missing.

Kernels run on CUDA tensors, and in Triton's interpreter (TRITON_INTERPRET=1 before Triton is first imported) on CPU
tensors as well.
"""
