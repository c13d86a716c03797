"""What the gateway reports: request records, access log, metrics, traces, the routing table and pings."""
