# SPDX-License-Identifier: Apache-2.0
"""Access to the API server: client, in-memory store of watched objects, server-side apply, drift."""
