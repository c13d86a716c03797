# SPDX-License-Identifier: Apache-2.0
"""The gateway: an OpenAI-compatible HTTP server that routes requests to engines.

http        servers, connections, TLS, request bodies, processes
auth        API keys, tenants, rate limits
openai      OpenAI's endpoints: schemas, parsing, JSON output; `responses` is the Responses API
requests    requests and their output, independent of the API that they came through
admission   limits on requests and tokens in flight, and the fair queue
routing     choosing an engine, retries, resuming, cache warm-up
engines     discovery, connections and health of engines
text        tokenizers, chat templates, detokenizing; `tools` and `reasoning` parse output
telemetry   metrics, access log, traces
"""
