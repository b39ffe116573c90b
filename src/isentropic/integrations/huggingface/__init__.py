"""Laws for the attention of Hugging Face transformers (the extra ``huggingface``).

In shapes, B is the batch size, H the number of heads and L the number of queries. The attention layers
of a model are numbered from 0, in the order of ``model.modules()``.

Laws are submodules of the attention modules, so that models with different laws are independent. A
model is saved with its laws. So that ``from_pretrained`` brings them back, importing this module
registers ``attn_implementation="isentropic"``. It also adds a step to four methods of PreTrainedModel,
to one of Trainer and to the lookup of attention functions, which do nothing for models without laws.
"""

from isentropic._checks import requires_extra

with requires_extra(__name__):
    import torch  # noqa: F401
    import tqdm  # noqa: F401  # comes with transformers, which an error should name
    import transformers  # noqa: F401

from isentropic.integrations.huggingface._bases import extend_interface
from isentropic.integrations.huggingface._diagnose import Diagnosis, Effect, diagnose
from isentropic.integrations.huggingface._files import load_laws, save_laws
from isentropic.integrations.huggingface._interface import register
from isentropic.integrations.huggingface._laws import laws_of, use
from isentropic.integrations.huggingface._measure import calibrate, profile
from isentropic.integrations.huggingface._modules import layer_names
from isentropic.integrations.huggingface._observe import ObserveCallback, observe
from isentropic.integrations.huggingface._saving import extend_transformers
from isentropic.integrations.huggingface._tune import tune

__all__ = [
    "Diagnosis",
    "Effect",
    "ObserveCallback",
    "calibrate",
    "diagnose",
    "laws_of",
    "layer_names",
    "load_laws",
    "observe",
    "profile",
    "register",
    "save_laws",
    "tune",
    "use",
]

register()
extend_interface()
extend_transformers()
