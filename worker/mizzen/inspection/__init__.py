# SPDX-License-Identifier: Apache-2.0
"""Says before a model is loaded whether it is served, and which memory it needs.

Only `code_check` imports torch, and only for models that run through Transformers.
"""
