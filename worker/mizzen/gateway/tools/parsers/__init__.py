# SPDX-License-Identifier: Apache-2.0
"""Incremental parsers of tool calls, one for each syntax in which models write calls."""
