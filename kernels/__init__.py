"""Installed as ``attn_ops.kernels``. As ``kernels``, in the root of a checkout, it has neither modules nor names.

A second import would register the ops twice. It raises no error, since other libraries, such as transformers, look for
a published package of that name: they find one without a version, and go on without it.
"""

if __name__ != "attn_ops.kernels":
    __path__ = []

    def __getattr__(name: str) -> object:
        # An AttributeError: pickle and hasattr() ask every module for names.
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: {__file__} is attn_ops.kernels: import attn_ops, "
            "installed by pip install -e . in that checkout; for the published package of that name, take the root of "
            "the checkout from sys.path"
        )
