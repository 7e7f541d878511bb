"""The models that a configuration can name, and GPT-2 as Hugging Face stores it."""
