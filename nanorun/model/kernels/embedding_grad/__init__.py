"""Gradients of embedding tables, accumulated in place.

A micro-batch looks up many rows of a table, and autograd makes a dense gradient of them: zeros everywhere, the
rows added into them, and the whole added to the gradient so far. A d12 has seven tables of 100 MB; with
sixteen micro-batches those zeros and sums are 45 GB a step, and the rows themselves a tenth of that.

So one buffer accumulates over micro-batches, and the backward pass adds the rows of its tokens to it. The buffer is the
table's `.grad`; autograd itself gets no gradient. Compiled code copies nothing: the operator writes to the buffer in
place (checked in the generated code).

Most tables are value embeddings, whose rows are added to the values through a gate: `add_gated_embedding` does that,
and in its backward pass one kernel computes the gradients of rows and gate without materializing the rows.

Rows of equal tokens are added by atomics, in any order, so sums differ in their last bits from run to run, as they do
in compiled code without this; with deterministic algorithms torch's ordered `index_add_` is used.
"""

from nanorun.model.kernels.embedding_grad.kernel import accumulate as accumulate
from nanorun.model.kernels.embedding_grad.kernel import add_gated_embedding as add_gated_embedding
from nanorun.model.kernels.embedding_grad.kernel import embedding_lookup as embedding_lookup
from nanorun.model.kernels.embedding_grad.kernel import gated_embedding_backward as gated_embedding_backward
