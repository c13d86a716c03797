# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API: convert content blocks to messages, and encode output as blocks and events."""
