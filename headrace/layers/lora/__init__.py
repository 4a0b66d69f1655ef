"""LoRA: what an adapter changes in a layer, and where its weights are on the device."""
