# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the wire: listening sockets, connected gateways, live requests and file uploads."""
