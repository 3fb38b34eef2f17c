"""Which KV pairs survive: the list of methods (`specs`, free of torch), and one module for each in `methods/`.

Another package adds a method with `register`, in a module that its entry point of the group `kvllm.methods` names.
"""

from kvllm.compression.specs import MethodSpec, Option, register

__all__ = ["MethodSpec", "Option", "register"]
