"""Which engine gets a request: composable scorers."""
