"""The protocol under torch, greenlets and nnsight: lazies, workers, transports. No vLLM."""
