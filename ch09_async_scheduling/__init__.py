"""Chapter 9: asynchronous scheduling and continuous batching."""
