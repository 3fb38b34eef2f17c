"""`kvllm` whose engine checks its block accounting behind every step. A step that leaves it wrong is the engine's last
one, so the log has the error, and clients see it."""

from __future__ import annotations

from kvllm.core.engine import LLMEngine
from kvllm.entrypoints.cli import main as run_command
from kvllm.outputs import RequestOutput


def main() -> None:
    step = LLMEngine.step

    def checked(self: LLMEngine) -> list[RequestOutput]:
        outputs = step(self)
        self.scheduler.check()
        return outputs

    LLMEngine.step = checked
    run_command()


if __name__ == "__main__":
    main()
