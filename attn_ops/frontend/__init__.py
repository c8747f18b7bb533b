"""What the modules with FlashInfer's names share: arguments, caches, scales, masks, resizable plans.

``attn_ops.decode``, ``prefill``, ``attention``, ``mla``, ``xqa``, ``cascade`` and ``pod`` are signatures over this
package, and this package is arguments over ``torch.ops.attn.*``: no kernel and no backend is chosen here.
"""
