"""The ops of ``torch.ops.attn``: schemas, options, checks, backends, registration and Inductor lowering."""
