"""Checkpoints: DeepSeek's safetensors layout in and out."""
