# SPDX-License-Identifier: Apache-2.0
"""Process groups of the ranks that share a model, and the collective operations between these ranks."""
