# SPDX-License-Identifier: Apache-2.0
"""The engine's own spans: rank 0 writes the times of finished requests, and the supervisor exports spans."""
