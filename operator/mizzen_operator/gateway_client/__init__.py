# SPDX-License-Identifier: Apache-2.0
"""Reads the routing tables of running gateways, and detects gateways that hang."""
