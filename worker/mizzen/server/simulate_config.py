# SPDX-License-Identifier: Apache-2.0
"""Configuration of a simulated engine, used by its command line and by its rank process."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.common.model_task import Task
from mizzen.common.options import option
from mizzen.server.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig(EngineConfig):
    """Options of a real engine, plus options for the simulated engine's speed, output and failures."""

    step_milliseconds: float = option(5.0, "Duration of a step", low=0, high=60_000)
    prefill_token_microseconds: float = option(0.0, "Time that each prompt token adds to its step", low=0)
    start_seconds: float = option(0.0, "Duration of the startup", low=0)
    reply: str = option("", "Answer to every request; by default endless tokens that depend on the prompt")
    die_after_tokens: int = option(0, "Kill the rank after this many tokens; 0 disables this", low=0)
    fail_after_tokens: int = option(0, "Fail a step after this many tokens; 0 disables this", low=0)
    hang_after_tokens: int = option(0, "Hang in a step after this many tokens; 0 disables this", low=0)
    fail_start: str = option("", "Fail the startup with this reason")
    image_capacity: int = option(
        0, "Number of embeddings of images that are kept; 0 if prompts have no images", low=0
    )
    task: str = option("generate", "Task of the model", choices=tuple(Task))
    labels: str = option("", "Labels of a classifier, separated by commas")

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels of a classifier; empty for other tasks."""
        return tuple(self.labels.split(",")) if self.labels else ()
