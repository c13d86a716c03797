# SPDX-License-Identifier: Apache-2.0
"""Families of decoder models; each module reads the config.json of one family into a `ModelConfig`."""
