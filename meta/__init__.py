"""Installed as ``attn_ops.meta``; a second import under another name would register the ops twice."""

if __name__ != "attn_ops.meta":
    raise ImportError(f"{__name__} is attn_ops.meta: install the project (pip install -e .) and import attn_ops")
