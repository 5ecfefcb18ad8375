"""Chapter 10: the paged cache: memory in blocks, shared between requests and read where it lies."""
