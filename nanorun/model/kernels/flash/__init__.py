"""FlashAttention-4 as custom operators.

The package `flash-attn-4` (with `nvidia-cutlass-dsl`) writes its kernels in Python and compiles them on their first
call; it caches them on disk for the next process when asked to, which `is_supported` does. A direct call from compiled
code would break the graph at every layer, so forward and backward are wrapped as two operators that the compiler does
not look into. The package is optional: nothing imports it before `is_supported` is called, which answers by running a
self-test.
"""

from nanorun.model.kernels.flash.kernel import DISK_CACHE as DISK_CACHE
from nanorun.model.kernels.flash.kernel import flash_attention as flash_attention
from nanorun.model.kernels.flash.kernel import is_supported as is_supported
