# SPDX-License-Identifier: Apache-2.0
"""The harmony format of gpt-oss: messages with channels, for reasoning, tool calls and answers."""
