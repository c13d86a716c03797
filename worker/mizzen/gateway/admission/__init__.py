# SPDX-License-Identifier: Apache-2.0
"""Admission of requests: limits on requests and tokens in flight, and a queue that is fair to all tenants."""
