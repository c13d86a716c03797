"""Tool calls: what a request may ask for, and how models write them."""
