# SPDX-License-Identifier: Apache-2.0
"""Step execution: runners, eager steps, CUDA graphs, per-slot device state, and tensor parallel ranks."""
