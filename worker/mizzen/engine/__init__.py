# SPDX-License-Identifier: Apache-2.0
"""The inference engine: loading, step execution, sampling, structured output, and a simulated device.

The engine processes (`mizzen.server`) and `LLM` use it through `mizzen.engine.engine.Engine`.
"""
