"""What never changes between chapters: the contract, the server, the benchmark and the tools around them."""
