"""The ``cpu`` backend: kernels for eager calls on the CPU."""
