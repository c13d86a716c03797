# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses API: convert input items to chat messages, and encode output as items and events."""
