# SPDX-License-Identifier: Apache-2.0
"""Fetch a model's files from a hub, a bucket or a registry into a folder, completely or not at all."""
