# SPDX-License-Identifier: Apache-2.0
"""Sampling in eager steps and in graphs: logits processing, sampling, log probabilities, side outputs."""
