"""Reads LoRA adapters: folders of PEFT and GGUF files, into the records that layers apply."""
