# SPDX-License-Identifier: Apache-2.0
"""Telemetry of the gateway: request records, access log, metrics, traces, routing table and pings."""
