# SPDX-License-Identifier: Apache-2.0
"""The Pod Security level that every pod of the product must meet."""

from __future__ import annotations

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
"""Labels of a namespace that admits only restricted pods."""
