"""What tests share: worlds of ranks, tiny models, small runs of the programs, stubs and layouts."""
