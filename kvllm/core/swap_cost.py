"""Whether it is cheaper to bring a preempted sequence's cache back from the host than to compute it again."""

from __future__ import annotations

from kvllm.core.protocol import StepPlan, StepResult

MEMORY = 0.9
"""Of what was measured before, what still counts when something is measured."""


class Rate:
    """What was done in a second, over the last measurements."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def measure(self, amount: float, seconds: float) -> None:
        self._amount = MEMORY * self._amount + amount
        self._seconds = MEMORY * self._seconds + seconds

    def seconds_for(self, amount: float) -> float:
        """0 as long as nothing was measured."""
        return amount * self._seconds / self._amount if self._amount else 0.0


class SwapCost:
    """Blocks over the measured speed of the link, out and back, against tokens over the measured speed of prefills.

    mode: "auto", "always" or "never".
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._link, self._prefill = Rate(), Rate()

    def measure(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from an executed plan."""
        if result.transfers.num_blocks:
            self._link.measure(result.transfers.num_blocks, result.transfers.seconds)
        if plan.has_prefill:
            self._prefill.measure(plan.num_tokens, result.seconds.model)

    def swaps(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether a cache of so many blocks goes to the host, rather than that its tokens are computed again. The first
        one does, as it tells how fast the link is."""
        if self.mode == "auto":
            return self._link.seconds_for(2 * num_blocks) <= self._prefill.seconds_for(num_tokens)
        return self.mode == "always"
