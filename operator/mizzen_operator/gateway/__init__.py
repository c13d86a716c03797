# SPDX-License-Identifier: Apache-2.0
"""Creates and updates gateways, dedicated to one service or shared by the services of a namespace."""
