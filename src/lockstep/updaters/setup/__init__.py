"""Read and check the arguments of an updater."""
