# SPDX-License-Identifier: Apache-2.0
"""Loading of safetensors checkpoints into a model's parameters."""
