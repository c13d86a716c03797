# SPDX-License-Identifier: Apache-2.0
"""Calls of litellm's SDK to a chat model and a reranker; prints what they return as JSON.

Usage: litellm_calls.py CHAT_URL RERANKER_URL, where the URLs end with /v1.
"""

from __future__ import annotations

import asyncio
import json
import sys

import litellm

QUESTION = [{"role": "user", "content": "What is Mizzen?"}]
OPTIONS = {"api_key": "none", "temperature": 0, "max_tokens": 20}
RERANK = {"api_key": "none", "query": "capital of france", "documents": ["berlin", "paris", "the city"]}


def main(chat: str, reranker: str) -> None:
    served = {"api_base": chat, **OPTIONS}
    answer = litellm.completion("openai/demo", QUESTION, **served)
    chunks = litellm.completion("hosted_vllm/demo", QUESTION, stream=True, **served)
    completed = litellm.text_completion("Mizzen is a", "text-completion-openai/demo", **served)
    vectors = litellm.embedding("openai/demo", ["a", "b"], api_base=chat, api_key="none")
    root = {"api_base": chat.removesuffix("/v1"), **OPTIONS}
    message = asyncio.run(litellm.anthropic_messages(model="anthropic/demo", messages=QUESTION, **root))
    ranked = {
        provider: litellm.rerank(f"{provider}/reranker", api_base=base, **RERANK).results
        for provider, base in (
            ("hosted_vllm", reranker),
            ("cohere", reranker.removesuffix("/v1")),
            ("jina_ai", f"{reranker}/rerank"),
        )
    }
    report = {
        "chat": answer.choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "completion": completed.choices[0].text,
        "vectors": [len(item["embedding"]) for item in vectors.data],
        "message": message["content"][0]["text"],
        "ranked": {
            name: [(item["index"], item["relevance_score"]) for item in items]
            for name, items in ranked.items()
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
