# SPDX-License-Identifier: Apache-2.0
"""Formats of quantized weights: the schemes of a checkpoint's layers, read from its configuration.

No module of this package imports torch: `mizzen inspect` and the supervisor read quantized checkpoints too.
"""
