"""What a checkpoint holds, as it lies on the disk: tensors, their packing, adapters, tokenizer files."""
