"""The hyper-connection operators: typed wrappers of `torch.ops.mhc.*`, registered by importing this package.

The operators of the namespace return, besides what the wrappers return, h and ms of `projection` where they
compute them; each has its gradient in an operator `mhc::<name>_backward` of its own.
"""

from mhc_compile import compat
from mhc_compile.ops import _launch, _loops  # noqa: F401  (registers them)
from mhc_compile.ops._checks import typed
from mhc_compile.ops.aggregate import aggregate
from mhc_compile.ops.aggregate_and_norm import aggregate_and_norm
from mhc_compile.ops.boundary import boundary
from mhc_compile.ops.contract import contract
from mhc_compile.ops.expand import expand
from mhc_compile.ops.expand_combine import expand_combine
from mhc_compile.ops.expand_combine_and_read import expand_combine_and_read
from mhc_compile.ops.generate_mix import generate_mix
from mhc_compile.ops.generate_mix_and_aggregate import generate_mix_and_aggregate
from mhc_compile.ops.head import head
from mhc_compile.ops.mix_streams import mix_streams
from mhc_compile.ops.projection import projection
from mhc_compile.ops.scale import scale
from mhc_compile.ops.shifted_boundary import shifted_boundary
from mhc_compile.ops.sinkhorn import sinkhorn

__all__ = [
    "aggregate",
    "aggregate_and_norm",
    "boundary",
    "contract",
    "expand",
    "expand_combine",
    "expand_combine_and_read",
    "generate_mix",
    "generate_mix_and_aggregate",
    "head",
    "mix_streams",
    "projection",
    "scale",
    "shifted_boundary",
    "sinkhorn",
]

for _name in __all__:
    globals()[_name] = typed(globals()[_name])


def _rules_of_dtensors() -> None:
    from mhc_compile.ops import _sharding

    _sharding.register_rules()


compat.when_dtensors_exist(_rules_of_dtensors)
