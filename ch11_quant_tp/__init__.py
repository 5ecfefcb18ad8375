"""Chapter 11: quantisation and tensor parallelism: the full engine."""
