"""Installed as ``attn_ops.kernels``; a second import under another name would register the ops twice."""

if __name__ != "attn_ops.kernels":
    raise ImportError(f"{__name__} is attn_ops.kernels: install the project (pip install -e .) and import attn_ops")
