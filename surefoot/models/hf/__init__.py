"""Models in the formats of Hugging Face transformers: settings and names of weights as data, one file a family."""
