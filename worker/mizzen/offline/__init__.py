"""Offline inference: batches of prompts in this process, without a server."""

from mizzen.offline.llm import LLM, Completion

__all__ = ["LLM", "Completion"]
