# SPDX-License-Identifier: Apache-2.0
"""Images in requests and plans, and the bookkeeping of their embeddings."""
