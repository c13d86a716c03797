# SPDX-License-Identifier: Apache-2.0
"""Parse and constrain reasoning, the part of the output in which a model thinks before it answers."""
