# SPDX-License-Identifier: Apache-2.0
"""Says before a model is loaded whether it is served, and which memory it needs. Does not import torch."""
