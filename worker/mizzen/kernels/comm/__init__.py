"""Communication kernels over peer memory."""
