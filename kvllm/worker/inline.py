"""The executor of one rank in this process."""

from __future__ import annotations

from kvllm.core.executor import Executor
from kvllm.core.protocol import StepPlan, StepResult, decode_plan, decode_result, encode
from kvllm.worker.model_runner import ModelRunner


class InlineExecutor(Executor):
    """Runs the model in the caller's thread. Plans and results still pass through their encoding, so that core and
    worker share no object: what works here works across processes."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.runner.execute(decode_plan(encode(plan)))
        return decode_result(encode(result))

    def close(self) -> None:
        """Let what goes to a disk arrive there. Memory goes with the object."""
        if self.runner.offloader:
            self.runner.offloader.close()
