"""Triton's interpreter, where it runs the kernels of these tests, with the numpy that is pinned."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton.runtime import interpreter
    except ImportError:
        interpreter = None

    if interpreter is not None:
        patch = interpreter._patch_lang_tensor

        def patch_for_numpy_2_4(tensor, scope):
            """Loop bounds are arrays of one element, which numpy no longer takes for numbers by itself."""
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = patch_for_numpy_2_4
