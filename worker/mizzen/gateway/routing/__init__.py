# SPDX-License-Identifier: Apache-2.0
"""Routing: choice of an engine for each request, retries and resumes on other engines, cache warm-up."""
