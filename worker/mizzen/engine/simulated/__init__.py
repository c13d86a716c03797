# SPDX-License-Identifier: Apache-2.0
"""A simulated device without a model: real plans and device state, scripted tokens and step times."""
