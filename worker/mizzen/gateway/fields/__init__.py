# SPDX-License-Identifier: Apache-2.0
"""Fields of request bodies: which of them are read, which are ignored, and which are refused."""
