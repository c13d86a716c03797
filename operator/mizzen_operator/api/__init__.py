# SPDX-License-Identifier: Apache-2.0
"""The InferenceService API: its dataclasses, labels, names of child objects, and checks. No I/O."""
