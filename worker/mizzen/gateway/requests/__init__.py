# SPDX-License-Identifier: Apache-2.0
"""API-independent requests: their parameters, their execution by engines, and their output.

`openai` and `responses` parse bodies into these types, and write the output as JSON.
"""
