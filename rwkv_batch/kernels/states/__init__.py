"""What kernels do with the states of slots outside the steps, and the log that steps keep beside them."""
