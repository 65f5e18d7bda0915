"""Device operations of the engine: tensors in, tensors out; knows no model and no request.

Import `kernels.ops` and `kernels.layout`. This file stays empty of code because transformers, where it is
installed, imports any top-level package of this name.
"""
