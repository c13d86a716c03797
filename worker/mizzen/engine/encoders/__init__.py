# SPDX-License-Identifier: Apache-2.0
"""Loads and runs encoders, which compute whole prompts without KV."""
