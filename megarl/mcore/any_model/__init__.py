"""Language models of transformers as they are: their modules, megarl's attention over packed sequences and the cache."""
