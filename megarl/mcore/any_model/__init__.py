"""Language models of transformers as they are: their modules, with megarl's attention, products and caches."""
