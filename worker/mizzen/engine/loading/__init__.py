# SPDX-License-Identifier: Apache-2.0
"""Loading of an engine: validation of options, model, memory budget, KV cache, graphs and warm-up."""
