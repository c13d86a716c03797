# SPDX-License-Identifier: Apache-2.0
"""Offline inference: batches of prompts in this process, without a server."""

from mizzen.offline.completion import Completion
from mizzen.offline.image_prompts import ImagePrompt
from mizzen.offline.llm import LLM

__all__ = ["LLM", "Completion", "ImagePrompt"]
