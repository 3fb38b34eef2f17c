"""Which sequences compress, and when: one file a policy. They know lengths, never tensors.

Another package adds a policy with `register_policy`, in a module that its entry point of the group `kvllm.policies`
names.
"""

from __future__ import annotations

from kvllm.config.policies import POLICIES, RESERVED, PolicyOptions, register_policy
from kvllm.core.policies.base import Candidate, CompressionPolicy, EngineLoad, group_regions, make_policy
from kvllm.core.policies.periodic import Periodic, PeriodicPolicy
from kvllm.core.policies.pressure import Pressure, PressurePolicy
from kvllm.core.policies.standalone import Standalone, StandalonePolicy
from kvllm.core.policies.threshold import Threshold, ThresholdPolicy
from kvllm.core.policies.windows import EventOptions, EventPolicy, WindowOptions, WindowPolicy

__all__ = [
    "Candidate",
    "CompressionPolicy",
    "EngineLoad",
    "EventOptions",
    "EventPolicy",
    "Periodic",
    "PeriodicPolicy",
    "PolicyOptions",
    "Pressure",
    "PressurePolicy",
    "Standalone",
    "StandalonePolicy",
    "Threshold",
    "ThresholdPolicy",
    "WindowOptions",
    "WindowPolicy",
    "group_regions",
    "make_policy",
    "register_policy",
]

for own in (PeriodicPolicy, PressurePolicy, StandalonePolicy, ThresholdPolicy):
    register_policy(own)
RESERVED.update(POLICIES)
