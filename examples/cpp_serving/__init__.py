"""The C++ serving example. The demo runs its server."""
