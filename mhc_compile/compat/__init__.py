"""Every private torch API that the project touches, for torch 2.11 to 2.14, and CUDA's driver.

Dynamo and Inductor are imported where they are needed: the operators import this package too, and need neither. All
names are used as `compat.name`; which module holds one is of no interest outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mhc_compile.compat.cpp import (
    compile_beside,
    cpp_compiler,
)
from mhc_compile.compat.distributed import (
    before_ddp_splits,
    job_store,
    rank,
    ranks,
)
from mhc_compile.compat.driver import (
    load_kernel,
)
from mhc_compile.compat.graphs import (
    Snapshot,
    asks_to_trace_again,
    compilation_again,
    compile_id,
    compile_without_inductor,
    copy_graph,
    copy_source,
    example,
    example_key,
    for_these_sizes,
    is_called,
    module_of,
    more_compilations,
    on_dynamo_reset,
    readable,
    sort_topologically,
    tensor_metadata,
    trace_artifact,
)
from mhc_compile.compat.inductor import (
    as_list,
    call_directly,
    call_in_worker,
    calls_graphs,
    compiles_ahead_of_time,
    cpp_library,
    fresh_inductor_cache,
    hash_files,
    inductor_cache_dir,
    inductor_compiler,
    inductor_config,
    inductor_decompositions,
    inference_aware,
    is_inference_aware,
    keep_arguments_of_calls,
    keep_order_of_writes,
    launches_from_c,
    makes_cuda_graphs,
    run_passes_after_grad,
    settle_triton,
    strides_to_keep,
    tell_workers,
)
from mhc_compile.compat.keeping import (
    carry_with_compiled_graphs,
)
from mhc_compile.compat.launches import (
    analyse_once,
)
from mhc_compile.compat.nodes import (
    AutogradFunction,
    aliased,
    autograd_function,
    bodies,
    call_regions,
    called_operator,
    changes_global_state,
    draws_random_numbers,
    is_composite,
    is_higher_order,
    is_kernel_launch,
    is_made_here,
    is_plain_call,
    is_pure,
    may_mutate,
    names_of_bodies,
    state_change,
    writes,
)
from mhc_compile.compat.operators import (
    SingleLevelFunction,
    apply_at_this_level,
    autocast_like,
    autocast_state,
    below_autograd,
    custom_op_autograd_kernel,
    forward_mode_is_active,
    functorch_is_active,
    no_autocast_cache,
    registered_operators,
)
from mhc_compile.compat.reading import (
    set_no_more,
    set_while_compiling,
)
from mhc_compile.compat.values import (
    FloatWatch,
    NeedsGuard,
    another_fake,
    common_fake_mode,
    composites_in_python,
    depends_on_data,
    fake_mode_of,
    float_watch,
    has_hint,
    hint,
    is_batched,
    may_be_equal,
    quiet_fakes,
    quiet_shape_env,
    same_size,
    same_strides,
    settle_sizes,
    settled,
    storage_of,
    symbolic_expression,
    symbols,
    without_fake_tracebacks,
    without_guards,
)
from mhc_compile.compat.versions import (
    NEWEST_TESTED,
    OLDEST,
    is_newer_than_tested,
    tell_if_untested,
)
from mhc_compile.compat.watching import (
    GraphBreak,
    RecompileLimit,
    breaks_around,
    watch_dynamo,
    watched,
    without_tracebacks,
)

__all__ = [
    "NEWEST_TESTED",
    "OLDEST",
    "AutogradFunction",
    "CustomGraphPass",
    "FloatWatch",
    "GraphBreak",
    "NeedsGuard",
    "RecompileLimit",
    "SingleLevelFunction",
    "Snapshot",
    "Unwrapped",
    "aliased",
    "analyse_once",
    "another_fake",
    "apply_at_this_level",
    "as_list",
    "asks_to_trace_again",
    "autocast_like",
    "autocast_state",
    "autograd_function",
    "before_ddp_splits",
    "below_autograd",
    "bodies",
    "breaks_around",
    "call_directly",
    "call_in_worker",
    "call_regions",
    "called_operator",
    "calls_graphs",
    "carry_with_compiled_graphs",
    "changes_global_state",
    "common_fake_mode",
    "compilation_again",
    "compile_beside",
    "compile_id",
    "compile_without_inductor",
    "compiles_ahead_of_time",
    "composites_in_python",
    "copy_graph",
    "copy_source",
    "cpp_compiler",
    "cpp_library",
    "custom_op_autograd_kernel",
    "depends_on_data",
    "draws_random_numbers",
    "example",
    "example_key",
    "fake_mode_of",
    "float_watch",
    "for_these_sizes",
    "forward_mode_is_active",
    "fresh_inductor_cache",
    "functorch_is_active",
    "has_hint",
    "hash_files",
    "hint",
    "inductor_cache_dir",
    "inductor_compiler",
    "inductor_config",
    "inductor_decompositions",
    "inference_aware",
    "is_batched",
    "is_called",
    "is_composite",
    "is_higher_order",
    "is_inference_aware",
    "is_kernel_launch",
    "is_made_here",
    "is_newer_than_tested",
    "is_plain_call",
    "is_pure",
    "job_store",
    "keep_arguments_of_calls",
    "keep_order_of_writes",
    "launches_from_c",
    "load_kernel",
    "makes_cuda_graphs",
    "may_be_equal",
    "may_mutate",
    "module_of",
    "more_compilations",
    "names_of_bodies",
    "no_autocast_cache",
    "on_dynamo_reset",
    "quiet_fakes",
    "quiet_shape_env",
    "rank",
    "ranks",
    "readable",
    "registered_operators",
    "run_passes_after_grad",
    "same_size",
    "same_strides",
    "set_no_more",
    "set_while_compiling",
    "settle_sizes",
    "settle_triton",
    "settled",
    "sort_topologically",
    "state_change",
    "storage_of",
    "strides_to_keep",
    "symbolic_expression",
    "symbols",
    "tell_if_untested",
    "tell_workers",
    "tensor_metadata",
    "trace_artifact",
    "watch_dynamo",
    "watched",
    "without_fake_tracebacks",
    "without_guards",
    "without_tracebacks",
    "writes",
]

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from mhc_compile.compat.errors import Unwrapped
else:
    # A type checker that saw this function would believe in any name.
    def __getattr__(name: str) -> Any:
        if name == "CustomGraphPass":
            from torch._inductor.custom_graph_pass import CustomGraphPass

            return CustomGraphPass
        if name == "Unwrapped":
            from mhc_compile.compat.errors import Unwrapped

            return Unwrapped
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
