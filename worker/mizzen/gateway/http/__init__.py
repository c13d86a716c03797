# SPDX-License-Identifier: Apache-2.0
"""HTTP side of the gateway: servers, connections, TLS, request bodies, deadlines, and several processes.

It does not depend on OpenAI's APIs; `openai` and `responses` are built on it.
"""
