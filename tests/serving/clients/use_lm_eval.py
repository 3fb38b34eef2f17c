"""lm-eval: log likelihoods and texts of small tasks. Arguments: FOLDER of the tasks, MODEL of lm-eval, ARGUMENTS."""

from __future__ import annotations

import json
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

folder, model, arguments = sys.argv[1:]
is_chat = model == "local-chat-completions"
found: Any = lm_eval.simple_evaluate(
    model=model,
    model_args=arguments,
    tasks=["write"] if is_chat else ["choose", "perplexity", "write"],
    task_manager=TaskManager(include_path=folder, include_defaults=False),
    apply_chat_template=is_chat,
    bootstrap_iters=0,
    device="cpu",
)
samples = {name: [sample["resps"] for sample in of_task] for name, of_task in found["samples"].items()}
print("\n" + json.dumps(samples))
