# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by gateway, engine and commands; they import neither torch nor other packages of Mizzen."""
