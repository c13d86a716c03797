# SPDX-License-Identifier: Apache-2.0
"""Images in requests: reads the parts that hold them, fetches URLs, and completes prompts with images."""
