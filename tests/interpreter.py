"""Triton's interpreter, which runs kernels on the CPU, with the numpy that is pinned."""

import os


def accept_array_loop_bounds() -> None:
    """Loop bounds are arrays of one element, which numpy no longer converts to numbers by itself."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "accepts_arrays", False):
        return

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch_with_index.accepts_arrays = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch_with_index
