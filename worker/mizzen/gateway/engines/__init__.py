# SPDX-License-Identifier: Apache-2.0
"""The gateway's view of engines: discovery, routing table, connections, health and verification."""
