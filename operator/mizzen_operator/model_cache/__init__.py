# SPDX-License-Identifier: Apache-2.0
"""Fetches models into caches by Jobs, and reports the progress of the downloads."""
