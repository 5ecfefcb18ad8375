"""Chapter 5: a KV cache, so that each token is computed once; static batches; the whole conversation."""
