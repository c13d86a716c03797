# SPDX-License-Identifier: Apache-2.0
"""Readers for the headers of image files, one module per format; they read no pixels."""
