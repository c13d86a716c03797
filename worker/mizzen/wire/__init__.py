# SPDX-License-Identifier: Apache-2.0
"""Messages between gateways and engines, and the sockets that carry them."""
