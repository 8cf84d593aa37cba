"""Everything that writes text: keyed random numbers, sampling, requests and the packing of what comes back."""
