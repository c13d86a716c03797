"""The inference engine: loading, step execution, sampling, structured output, and a simulated device.

Processes of `mizzen.server` and `LLM` drive it through `mizzen.engine.engine.Engine`.
"""
