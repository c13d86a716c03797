# SPDX-License-Identifier: Apache-2.0
"""Watches that keep the stores of `kube/store.py` up to date, and the poller of unwatched children."""
