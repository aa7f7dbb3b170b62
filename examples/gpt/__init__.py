"""A byte-level GPT in plain JAX, trained with an automatic plan (`make gpt`)."""
