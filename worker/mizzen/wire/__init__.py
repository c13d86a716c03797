"""Messages between gateways and engines, and the sockets that carry them."""
