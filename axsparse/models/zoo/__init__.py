"""The models that a configuration can name, and the translation of Hugging Face's GPT-2."""
