"""Laws for the attention of Hugging Face transformers (the extra ``huggingface``).

In shapes, B is the batch size, H the number of heads and L the number of queries. The attention layers
of a model are numbered from 0, in the order of ``model.modules()``.

Laws are submodules of the attention modules, so that models with different laws are independent. What
importing this module adds to transformers does nothing for models without laws:

- ``attn_implementation="isentropic"`` is registered, so that ``from_pretrained`` finds it.
- Both lookups of attention functions, ``AttentionInterface.get_interface`` and ``__getitem__``, return
  functions that apply the law of the calling module. Models use either.
- ``PreTrainedModel.post_init`` makes the laws that the configuration describes, before weights are
  loaded, and ``_check_and_adjust_attn_implementation`` finds their implementation, before layers are
  made. ``initialize_weights`` gives laws that were not loaded their values. ``save_pretrained`` first
  writes the present laws into the configuration.
"""

from isentropic._checks import requires_extra

with requires_extra(__name__):
    import torch  # noqa: F401
    import tqdm  # noqa: F401  # comes with transformers, which an error should name
    import transformers  # noqa: F401

from isentropic.integrations.huggingface._cache import quantized_cache
from isentropic.integrations.huggingface._interface import extend_interface
from isentropic.integrations.huggingface._laws import laws_of, use
from isentropic.integrations.huggingface._measure import calibrate, observe, profile
from isentropic.integrations.huggingface._saving import extend_transformers
from isentropic.integrations.huggingface._tune import tune

__all__ = [
    "calibrate",
    "laws_of",
    "observe",
    "profile",
    "quantized_cache",
    "tune",
    "use",
]

extend_interface()
extend_transformers()
