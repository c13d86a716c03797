# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible HTTP API: JSON schemas, request parsing, response encoding, endpoints."""
