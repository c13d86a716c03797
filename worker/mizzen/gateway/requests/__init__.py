"""Requests independent of the API that they arrive by: what they ask for, their way through engines, and
their output.

`openai` and `responses` parse bodies into these types and write them as JSON.
"""
