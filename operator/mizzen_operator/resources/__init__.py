# SPDX-License-Identifier: Apache-2.0
"""Builds the manifests of all child objects. Pure."""
