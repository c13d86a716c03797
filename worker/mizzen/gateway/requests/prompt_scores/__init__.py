# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of prompts that begin alike, so that tokens they have in common are scored only once."""
