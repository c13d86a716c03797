# SPDX-License-Identifier: Apache-2.0
"""The gRPC API of the gateway: health, generate, embed, abort and information about models."""
