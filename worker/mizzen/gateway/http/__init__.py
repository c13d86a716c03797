"""HTTP side of the gateway: servers, connections, TLS, request bodies, deadlines and the processes behind one
port.

Knows nothing of OpenAI's APIs; `openai` and `responses` are built on it.
"""
