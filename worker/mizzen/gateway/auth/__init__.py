# SPDX-License-Identifier: Apache-2.0
"""Authentication by API key and limits per key: key files, tenants, rate limits, and their middleware."""
