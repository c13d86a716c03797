# SPDX-License-Identifier: Apache-2.0
"""Vision encoders: towers that turn images into embeddings of a decoder, and readers of their fields."""
