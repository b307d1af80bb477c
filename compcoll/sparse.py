"""The public names of `compcoll.codecs.sparse`: methods that send few elements of a buffer, as indices and values.

>>> gradient, feedback = np.ones(4096, np.float32), compcoll.ErrorFeedback()
>>> total = compcoll.allreduce(gradient, codec="topk", density=0.001, feedback=feedback)
"""

from .codecs.sparse import *  # noqa: F403
from .codecs.sparse import __all__ as __all__
