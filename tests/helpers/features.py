"""What a worker keeps beside its KV pool."""

from __future__ import annotations

from typing import TypeVar

from kvllm.worker.features.base import StepFeature
from kvllm.worker.model_runner import ModelRunner

Kind = TypeVar("Kind", bound=StepFeature)


def feature_of(runner: ModelRunner, kind: type[Kind]) -> Kind:
    """The only one of a kind."""
    [feature] = [feature for feature in runner.features if isinstance(feature, kind)]
    return feature
