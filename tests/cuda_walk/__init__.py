"""Programs of megarl on a CUDA device without hardware."""
