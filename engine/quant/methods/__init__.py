"""What quantization methods write into a config.json, one file each. No torch."""
